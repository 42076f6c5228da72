"""Tests of `adapters/remote/protocol`."""
