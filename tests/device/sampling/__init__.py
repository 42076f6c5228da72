"""Tests of `adapters/device/sampling`."""
