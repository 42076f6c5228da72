"""Tests of `adapters/models/gguf`."""
