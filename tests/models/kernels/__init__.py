"""Tests of `adapters/models/kernels`."""
