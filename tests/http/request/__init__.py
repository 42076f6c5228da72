"""Tests of `adapters/http/request`."""
