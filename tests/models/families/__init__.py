"""Tests of `adapters/models/families`."""
