"""`rekindle cache`: shows what a cache folder holds, checks it, and makes it smaller.

Begin with `cache_folder.py`.
"""
