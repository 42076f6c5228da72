"""Tests of `engine/core`."""
