"""Tests of `adapters/models/decoder`."""
