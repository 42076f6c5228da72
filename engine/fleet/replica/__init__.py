"""A replica of a fleet: the actor, its cache folder and its server process.

Begin with `engine_replica.py`. Knows neither ingress nor router.
"""
