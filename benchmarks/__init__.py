"""What docs/BENCHMARKS.md tells, measured: side by side in one run, medians and ratios, raw figures as JSON."""

import engine  # noqa: F401 - before torch: how its threads wait
