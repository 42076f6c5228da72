"""The documentation, held to the code that it tells of."""
