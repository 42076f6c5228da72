"""From a trace to a page: replayed, collected, and put into one HTML file that needs nothing else."""

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
from engine.core.replay import CUT_SHORT, CutShort, Diverged, Replay, until_cut
from engine.core.trace import BadTrace, Header, read
from engine.settings.formatting import counted, size
from engine.settings.progress import progress
from engine.settings.user_error import UserError
from engine.tools.timeline.collect_timeline import Timeline
from engine.tools.timeline.columns import MOST_TEXT, compressed

# Of a page. What a trace of a million events needs is an eighth; one that was made to compress badly is refused.
MOST_BYTES = 128 << 20
SCRIPTS = ("data.js", "paint.js", "draw.js", "tell.js", "hands.js")  # one module, in this order
SETTINGS = ("slots", "chunk", "block_size", "max_context", "max_queue", "batch_rows", "store", "block", "stateful")


@frozen
class Written:
    """What to tell of a page. trouble: why the trace is not all on it; status: of the command."""

    line: str
    trouble: str
    status: int


@define
class Viewed:
    """What could be read of a trace. trouble: why it is not all of it, for people; status: of the command."""

    header: Header
    timeline: Timeline
    trouble: str = ""
    status: int = 0


def written(path: Path, output: Path | None = None, first: int = 0, until: int | None = None) -> Written:
    """Raises Refusal, OSError, or BadTrace where nothing can be read."""
    target = output or path.with_name(path.name.removesuffix(".zst").removesuffix(".jsonl") + ".html")
    if target.exists() and path.exists() and target.samefile(path):
        raise UserError(f"{target}: is the trace itself; accepted: another name for the page (-o)")
    viewed = collected(path, first, until)
    timeline = viewed.timeline
    if not timeline.times:
        what = viewed.trouble.splitlines()[0] if viewed.trouble else f"no event from {first} on"
        raise UserError(f"{path}: nothing to show: {what.removeprefix(f'{path}: ')}")
    text = page(viewed, path.name)
    target.write_text(text, encoding="utf-8")
    shown = f"{counted(len(timeline.requests), 'request')}, {counted(len(timeline.times), 'event')}"
    return Written(f"{target}: {shown}, {size(len(text))}", viewed.trouble, viewed.status)


def collected(path: Path, first: int = 0, until: int | None = None) -> Viewed:
    """Up to where it is damaged, cut short or no longer leads to what was recorded. Raises BadTrace for a trace of
    another version, or none.
    """
    header, records = read(path)
    viewed, run = Viewed(header, Timeline(first)), Replay.of(header)
    try:
        with progress("lines of the trace") as step:
            for number, record in until_cut(records):
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
    except Diverged as error:
        viewed.trouble, viewed.status = str(error), CUT_SHORT if isinstance(error, CutShort) else 1
    except BadTrace as error:
        viewed.trouble, viewed.status = str(error), 2
    return viewed


def page(viewed: Viewed, name: str) -> str:
    """Nothing of the trace is in it but letters, digits, + and /, and its file's name, escaped. The policy lets the
    page's own script and style through, told by what they are, and nothing else.
    """
    style, script, frame = part("page.css"), "\n".join(map(part, SCRIPTS)), part("page.html")
    data = compressed({"about": about(viewed, name), **viewed.timeline.packed()})
    if len(data) > MOST_BYTES:
        raise UserError(f"a page of {size(len(data))}; accepted: up to {size(MOST_BYTES)}; --from, --until show a part")
    parts = {"style": style, "script": script, "data": data, "title": html.escape(name)}
    parts |= {"script-hash": hashed(script), "style-hash": hashed(style)}
    return re.sub(r"{{([a-z-]+)}}", lambda found: parts[found[1]], frame)  # once over it: names may have braces, too


def part(name: str) -> str:
    return resources.files("engine.tools.timeline").joinpath("page", name).read_text(encoding="utf-8")


def hashed(text: str) -> str:
    """As a content policy names what it lets through."""
    return f"sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}"


def about(viewed: Viewed, name: str) -> dict[str, Any]:
    header, timeline = viewed.header, viewed.timeline
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
