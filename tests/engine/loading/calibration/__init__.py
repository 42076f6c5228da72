"""Tests of `engine/loading/calibration`."""
