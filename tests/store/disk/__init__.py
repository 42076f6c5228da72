"""Tests of `adapters/store/disk`."""
