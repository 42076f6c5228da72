"""`rekindle bench serve`: a load on any OpenAI-compatible server, and how it bore that, measured over HTTP."""
