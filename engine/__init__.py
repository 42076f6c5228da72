"""The shell: the only place where purity meets clocks, threads and sockets. Imports everything; nothing imports it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rekindle")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"
