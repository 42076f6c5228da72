"""Tests of `engine/settings`."""
