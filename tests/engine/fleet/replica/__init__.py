"""Tests of `engine/fleet/replica`."""
