"""Tests of `engine/fleet/router`."""
