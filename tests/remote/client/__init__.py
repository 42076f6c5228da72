"""Tests of `adapters/remote/client`."""
