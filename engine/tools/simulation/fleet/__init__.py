"""Simulates several replicas behind a router, without a model: `rekindle simulate --replicas 64 --router prefix`.

Begin with `fleet_run.py`. May import the rest of `simulation`.
"""
