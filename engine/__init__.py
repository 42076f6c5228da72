"""The shell: the only place where purity meets clocks, threads and sockets. Imports everything; nothing imports it."""

import os

# Before torch is imported: its CPU threads spin for milliseconds at every barrier, and where another process wants the
# cores a decode step then took 200 ms instead of 5. Spinning briefly costs a little on idle cores (docs/decisions/013).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Before the first product: oneDNN keeps what it has prepared for each shape, 0.6 MiB whatever the shape, and 1,024 of
# them if nothing else is said. A server of mixed lengths would grow to 0.6 GiB within days and never give it back. A
# step of four slots wants some 60, and one of 16 is no later with 128 than with 512 (docs/decisions/016).
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def __getattr__(name: str) -> str:
    """Look `__version__` up on first use, because that takes a tenth of the time of `--help`."""
    if name != "__version__":
        raise AttributeError(name)
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("rekindle")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0.0.0"
