"""Tests of `adapters/text/answer/forms`."""
