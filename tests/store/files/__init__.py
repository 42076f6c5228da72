"""Tests of `adapters/store/files`."""
