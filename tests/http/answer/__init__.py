"""Tests of `adapters/http/answer`."""
