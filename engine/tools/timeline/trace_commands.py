"""The command `rekindle trace view`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from engine.settings.option_types import Quiet
from engine.settings.user_error import UserError

TRACE = """Look at what `rekindle serve --trace` recorded.

`rekindle trace view today.jsonl.zst`
"""
trace = App(name="trace", help=TRACE, sort_key=2)
Seq = Annotated[int | None, Parameter(validator=Number(gte=0, lte=1 << 62))]


@trace.command(sort_key=1)
def view(
    file: Annotated[Path, Parameter(name="FILE")],
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    from_: Annotated[int, Parameter(name="--from", validator=Number(gte=0, lte=1 << 62))] = 0,
    until: Seq = None,
    quiet: Quiet = False,
) -> int:
    """Write a timeline of a trace as one HTML page: requests, their states, launches and cache hits.

    Any browser shows the page, without a server or a network. It holds no text and no tokens of prompts. A trace that
    is damaged or cut short is shown up to there; the exit status is then that of `rekindle replay`.

    `rekindle trace view today.jsonl.zst`

    `rekindle trace view today.jsonl.zst -o today.html --from 50000 --until 90000`

    Parameters
    ----------
    file
        A trace from `rekindle serve --trace`.
    output
        File name of the page. By default the name of the trace with .html.
    from_
        First event on the page.
    until
        Last event on the page.
    quiet
        Show no progress.
    """
    from engine.core.trace import BadTrace  # noqa: PLC0415
    from engine.settings.output.progress import silence_progress  # noqa: PLC0415
    from engine.tools.timeline.timeline_page import write_page  # noqa: PLC0415

    try:
        with silence_progress(quiet):
            done = write_page(file, output, from_, until)
    except BadTrace as error:
        raise UserError(str(error)) from error
    print(done.line)
    if done.trouble:
        print(done.trouble, file=sys.stderr)
    return done.status
