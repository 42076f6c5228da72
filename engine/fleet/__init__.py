"""`rekindle fleet`: several replicas of the server as one Ray Serve application.

Begin with `application.py`. May import `serving`, `core`, `loading` and `settings`. Only this package imports Ray.
"""
