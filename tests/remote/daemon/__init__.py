"""Tests of `adapters/remote/daemon`."""
