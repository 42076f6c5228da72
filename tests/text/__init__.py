"""Text: tokenizer, template, detokenisation."""
