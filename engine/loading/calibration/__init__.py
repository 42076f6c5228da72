"""Measurements at the start: how long computing, restoring and sharing take here.

Begin with `calibrate_compute.py`. May import `memory` and the peers of a shard.
"""
