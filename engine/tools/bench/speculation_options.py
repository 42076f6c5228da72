"""The options of `rekindle bench speculation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from attrs import frozen
from cyclopts import Parameter
from cyclopts.validators import Number

from engine.tools.bench.bench_options import ASKED, MOST_LENGTH, PROMPTS, SHOWN

MOST_WIDTH = 31  # proposals of a decode step


@frozen(kw_only=True)
class SpeculationBenchOptions:
    """Options of `rekindle bench speculation`."""

    log: Annotated[tuple[Path, ...], Parameter(group=PROMPTS, consume_multiple=True, negative="")]
    """Logs of requests with their texts, in a format that `rekindle simulate` reads."""

    requests: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=1))] = 20
    """Number of requests, evenly taken from all logs."""

    prompt_tokens: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=2, lte=MOST_LENGTH))] = 2048
    """Longest prompt. Of a longer one the end is taken."""

    answer_tokens: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=2, lte=MOST_LENGTH))] = 256
    """Longest answer. Of a longer one the beginning is taken."""

    model: Annotated[str, Parameter(group=ASKED)] = "demo"
    """Model that verifies the proposals: a folder, a GGUF file or the name of a demo. It is made to give the answers of
    the log."""

    draft: Annotated[str, Parameter(group=ASKED)] = "auto,suffix"
    """Kinds of drafts, as in `rekindle serve`, separated by commas. Each is measured alone."""

    width: Annotated[int, Parameter(group=ASKED, validator=Number(gte=1, lte=MOST_WIDTH))] = 7
    """Tokens that are proposed in a decode step."""

    json: Annotated[bool, Parameter(group=SHOWN, negative="", show_default=False)] = False
    """Print only JSON on standard output."""

    @property
    def drafts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.draft.split(",")))
