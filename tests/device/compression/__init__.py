"""Tests of `adapters/device/compression`."""
