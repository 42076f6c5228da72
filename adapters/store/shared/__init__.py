"""The shared tier: runs as objects in a store that several servers use, found by listing and read in ranges.

Begin with `shared_tier.py`. Pure decisions are in `store_health.py` and `garbage_policy.py`; only `object_client.py`
imports the client library. May import the packages of the store below it, and `files`.
"""
