"""Everything that a person can choose, and how commands speak: options, files, paths, errors, logs and progress.

Begin with `options.py`. Imports no other package of the engine.
"""
