"""The run that a file must hold."""

from __future__ import annotations

from attrs import frozen

from adapters.store.files.file_format import Layout, Run


@frozen
class Expected:
    """The size with which a file was written, and the run that it must hold."""

    size: int
    run: Run
    layout: Layout
