"""Tests of `engine/fleet/ingress`."""
