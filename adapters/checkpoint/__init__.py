"""Checkpoint folders as Hugging Face publishes them: configuration, weights, text. No model is known here."""
