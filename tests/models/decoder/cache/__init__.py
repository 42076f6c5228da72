"""Tests of `adapters/models/decoder/cache`."""
