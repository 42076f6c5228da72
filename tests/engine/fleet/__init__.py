"""Tests of `engine/fleet`."""
