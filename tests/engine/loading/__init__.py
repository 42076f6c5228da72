"""Tests of `engine/loading`."""
