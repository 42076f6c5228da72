"""Tests of what benchmarks record, and of the page and the chart that are made from it."""
