"""Text: tokenizer, chat template, and the way back from tokens to text as they come."""
