"""Tests of `adapters/models/drafts`."""
