"""The shell: the only place where purity meets clocks, threads and sockets. Imports everything; nothing imports it."""

import os
from importlib.metadata import PackageNotFoundError, version

# Before torch is imported: its CPU threads spin for milliseconds at every barrier, and where another process wants the
# cores a decode step then took 200 ms instead of 5. Spinning briefly costs a little on idle cores (docs/BENCHMARKS.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

try:
    __version__ = version("rekindle")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"
