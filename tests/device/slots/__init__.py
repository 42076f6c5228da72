"""Tests of `adapters/device/slots`."""
