"""Tests of `adapters/device/decode`."""
