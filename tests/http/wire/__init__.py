"""Tests of `adapters/http/wire`."""
