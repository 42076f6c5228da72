"""The executors of effects and all other code that does I/O: models, devices, text, HTTP, stores.

Imports effects, never states or engine.
"""
