"""Tests of `engine/serving`."""
