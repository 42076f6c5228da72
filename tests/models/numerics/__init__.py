"""Tests of `adapters/models/numerics`."""
