"""Tests of `adapters/http/history`."""
