"""The HTTP edge: strict requests in, jobs to the engine's door, answers out as OpenAI clients expect them."""
