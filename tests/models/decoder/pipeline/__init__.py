"""Tests of `adapters/models/decoder/pipeline`."""
