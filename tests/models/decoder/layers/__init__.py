"""Tests of `adapters/models/decoder/layers`."""
