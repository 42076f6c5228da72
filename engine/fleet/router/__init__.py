"""The router of requests to replicas, as Ray Serve calls it, and its trace.

Begin with `prefix_router.py`. The decisions are in `states/routing`.
"""
