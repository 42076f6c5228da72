"""Tests of `adapters/device/lane`."""
