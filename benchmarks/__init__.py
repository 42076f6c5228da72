"""Measurements: side by side in one run, medians and ratios. Begin reading with `results.py`, which every one uses.

`results/` holds what was recorded, `report.py` makes docs/BENCHMARKS.md from it, and `chart.py` the README's chart.
"""

import engine  # noqa: F401 - before torch: how its threads wait
