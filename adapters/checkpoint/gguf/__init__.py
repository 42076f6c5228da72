"""GGUF files, as llama.cpp writes them: header, packed types and tokenizer. It knows no model.

Begin with `header.py`. Imports the other modules of `adapters.checkpoint`.
"""
