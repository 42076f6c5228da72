"""Tests of `engine/loading/drafts`."""
