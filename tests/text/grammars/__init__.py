"""Tests of `adapters/text/grammars`."""
