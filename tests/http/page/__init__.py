"""Tests of `adapters/http/page`."""
