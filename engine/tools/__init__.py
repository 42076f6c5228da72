"""The commands other than `serve`: simulation, load generation, chat, cache, doctor, timeline and the list of models.

Each tool has its own package. May import `core`, `loading` and `settings`.
"""
