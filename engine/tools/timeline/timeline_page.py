"""Builds the page from a trace: replays it, collects its content, and writes one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
import re
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

from attrs import define, frozen

from engine.core.event_loop import Envelope
from engine.core.replay import CUT_SHORT, Replay, ReplayDiffers, TraceCutShort, until_cut_line
from engine.core.trace import BadTrace, Header, read_trace
from engine.settings.output.formatting import format_bytes, format_count
from engine.settings.output.progress import count_progress
from engine.settings.user_error import UserError
from engine.tools.timeline.collect_timeline import Timeline
from engine.tools.timeline.columns import MOST_TEXT, compress

# The most bytes of a page. A trace of a million events needs an eighth. A trace that was made to compress badly is
# refused.
MOST_BYTES = 128 << 20
SCRIPTS = ("data.js", "paint.js", "draw.js", "tell.js", "hands.js")  # one module, in this order
SETTINGS = (
    "slots",
    "chunk",
    "block_size",
    "max_context",
    "max_queue",
    "batch_rows",
    "store",
    "max_proposals",
    "stateful",
)


@frozen
class PageResult:
    """The result of writing a page.

    trouble: why not all of the trace is on it. status: the exit status of the command.
    """

    line: str
    trouble: str
    status: int


@define
class ReadTrace:
    """The part of a trace that could be read. trouble: why it is not all. status: the exit status of the command."""

    header: Header
    timeline: Timeline
    trouble: str = ""
    status: int = 0


def write_page(path: Path, output: Path | None = None, first: int = 0, until: int | None = None) -> PageResult:
    """Write the page of a trace. Raises UserError, OSError, or BadTrace if nothing can be read."""
    target = output or path.with_name(path.name.removesuffix(".zst").removesuffix(".jsonl") + ".html")
    if target.exists() and path.exists() and target.samefile(path):
        raise UserError(f"{target}: is the trace itself; accepted: another name for the page (-o)")
    viewed = collect_timeline(path, first, until)
    timeline = viewed.timeline
    if not timeline.times:
        what = viewed.trouble.splitlines()[0] if viewed.trouble else f"no event from {first} on"
        raise UserError(f"{path}: nothing to show: {what.removeprefix(f'{path}: ')}")
    text = build_page(viewed, path.name)
    target.write_text(text, encoding="utf-8")
    shown = f"{format_count(len(timeline.requests), 'request')}, {format_count(len(timeline.times), 'event')}"
    return PageResult(f"{target}: {shown}, {format_bytes(len(text))}", viewed.trouble, viewed.status)


def collect_timeline(path: Path, first: int = 0, until: int | None = None) -> ReadTrace:
    """Collect the timeline up to the first event that is damaged, missing, or replayed with another result.

    Raises BadTrace for a trace of another version, or a file that is no trace.
    """
    header, records = read_trace(path)
    viewed = ReadTrace(header, Timeline(first))
    run = Replay.from_header(header)
    try:
        with count_progress("lines of the trace") as step:
            for number, record in until_cut_line(records):
                if isinstance(record, Envelope):
                    if until is not None and record.seq > until:
                        return viewed
                    before = run.world
                    outs = run.feed(number, record)
                    viewed.timeline.observe(record, outs, before, run.world)
                else:
                    run.feed(number, record)
                step()
        run.finish()
    except ReplayDiffers as error:
        viewed.trouble = str(error)
        viewed.status = CUT_SHORT if isinstance(error, TraceCutShort) else 1
    except BadTrace as error:
        viewed.trouble = str(error)
        viewed.status = 2
    return viewed


def build_page(viewed: ReadTrace, name: str) -> str:
    """Return the HTML of the page.

    The trace adds nothing but letters, digits, + and /, and the escaped name of its file. The content policy admits the
    page's own script and style by their hashes, and nothing else.
    """
    style = read_part("page.css")
    script = "\n".join(map(read_part, SCRIPTS))
    frame = read_part("page.html")
    data = compress({"about": describe_trace(viewed, name), **viewed.timeline.pack()})
    if len(data) > MOST_BYTES:
        size = format_bytes(len(data))
        most = format_bytes(MOST_BYTES)
        raise UserError(f"a page of {size}; accepted: up to {most}; --from, --until show a part")
    parts = {"style": style, "script": script, "data": data, "title": html.escape(name)}
    parts |= {"script-hash": hash_source(script), "style-hash": hash_source(style)}
    # All marks are replaced in one pass, because names may have braces too.
    return re.sub(r"{{([a-z-]+)}}", lambda found: parts[found[1]], frame)


def read_part(name: str) -> str:
    return resources.files("engine.tools.timeline").joinpath("page", name).read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    """Return the hash by which a content policy admits a source."""
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def describe_trace(viewed: ReadTrace, name: str) -> dict[str, Any]:
    header = viewed.header
    timeline = viewed.timeline
    last = timeline.seqs[1]
    left_out = f"{timeline.left_out:,} events after event {last} found no room: --from {last + 1} shows them"
    return {
        "name": name[:MOST_TEXT],
        "engine": header.engine[:MOST_TEXT],
        "identity": header.identity[:MOST_TEXT],
        "model": str(header.config.get("model", ""))[:MOST_TEXT],
        "redacted": header.redacted,
        "settings": {key: getattr(header.settings, key) for key in SETTINGS},
        "trouble": [said for said in (viewed.trouble[:2000], left_out if timeline.left_out else "") if said],
    }
