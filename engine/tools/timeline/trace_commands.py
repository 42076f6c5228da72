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
    """Write a timeline of a trace, one HTML page that any browser shows: requests, their states, launches, hits.

    The page needs nothing else, and has no text and no tokens in it. Of a trace that is damaged or cut short it shows
    what comes before, says why, and the exit status is that of `rekindle replay`.

    `rekindle trace view today.jsonl.zst`

    `rekindle trace view today.jsonl.zst -o today.html --from 50000 --until 90000`

    Parameters
    ----------
    file
        A trace from `rekindle serve --trace`.
    output
        The page. By default beside the trace, with its name and .html.
    from_
        Begin with this event.
    until
        End with this event.
    quiet
        Do not tell how far it has got.
    """
    from engine.core.trace import BadTrace  # noqa: PLC0415
    from engine.settings.progress import silence_progress  # noqa: PLC0415
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
