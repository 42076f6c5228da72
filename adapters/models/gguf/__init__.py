"""Models of our families in GGUF files: what llama.cpp calls their settings and tensors, and what it did to them."""
