"""Tests of `adapters/device/speculation`."""
