"""`rekindle bench serve`: puts a load on any OpenAI-compatible server and measures over HTTP how it serves the load.
`rekindle bench needles` measures retrieval from long texts.

Begin with `measure_server.py`.
"""
