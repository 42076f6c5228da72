"""Tests of `engine/settings/output`."""
