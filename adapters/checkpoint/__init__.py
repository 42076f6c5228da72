"""Checkpoints: configuration, weights and text files of Hugging Face folders and GGUF files. It knows no model.

Begin with `safetensors_folder.py`, which has the interface of a stored tensor. Imports effects and adapters/*.py only.
"""
