"""GGUF files, as llama.cpp writes them: header, packed types, tokenizer. No model is known here."""
