"""What an answer's text says: reasoning, text and tool calls, told apart as they come."""
