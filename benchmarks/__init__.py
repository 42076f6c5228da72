"""What docs/BENCHMARKS.md tells, measured: side by side in one run, medians and ratios, raw figures as JSON."""
