"""Files of the prefix cache: their names, format, journal, and the private folder that they lie in.

Begin with `file_format.py`. Imports no other package of the store but its interfaces.
"""
