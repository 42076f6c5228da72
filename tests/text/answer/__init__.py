"""Tests of `adapters/text/answer`."""
