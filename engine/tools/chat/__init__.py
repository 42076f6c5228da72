"""`rekindle chat`: a conversation in a terminal with any OpenAI-compatible server, ours by default."""
