"""Tests of `adapters/http/apis`."""
