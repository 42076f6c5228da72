"""Tests of `engine/loading/memory`."""
