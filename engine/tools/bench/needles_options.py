"""The options of `rekindle bench needles`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from attrs import frozen
from cyclopts import Parameter
from cyclopts.validators import Number

from engine.tools.bench.bench_options import ASKED, MOST_LENGTH, PROMPTS, SHOWN, check_url, parse_whole_numbers
from engine.tools.bench.haystack import NAMES


def check_token_counts(_: Any, value: str) -> None:
    parse_whole_numbers(value, MOST_LENGTH, "a number of tokens")


def check_needles(_: Any, value: str) -> None:
    parse_whole_numbers(value, len(NAMES), "a number of needles")


def check_depths(_: Any, value: str) -> None:
    parse_depths(value)


def parse_depths(value: str) -> tuple[float, ...]:
    try:
        depths = tuple(dict.fromkeys(float(word) for word in value.split(",")))
    except ValueError:
        depths = (-1.0,)
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            "Must be a number from 0, a text's beginning, to 1, its end; several with commas between them."
        )
    return depths


@frozen(kw_only=True)
class NeedleOptions:
    """Options of `rekindle bench needles`."""

    url: Annotated[str, Parameter(group=ASKED, validator=check_url)] = "http://127.0.0.1:8000"
    """Where the Rekindle server is, with a --prefill-drafter; /v1 is added."""

    model: Annotated[str, Parameter(group=ASKED, show_default=False)] = ""
    """Model to name in requests; else the first one that the server lists."""

    api_key: Annotated[str, Parameter(group=ASKED, env_var="OPENAI_API_KEY", show_default=False)] = ""
    """Sent as a bearer token."""

    timeout: Annotated[float, Parameter(group=ASKED, validator=Number(gt=0, lte=86_400))] = 600.0
    """Seconds without an answer after which a question has failed."""

    lengths: Annotated[str, Parameter(group=PROMPTS, validator=check_token_counts)] = "2000,6000"
    """Tokens of the texts, with commas between them."""

    depths: Annotated[str, Parameter(group=PROMPTS, validator=check_depths)] = "0,0.25,0.5,0.75,1"
    """Where a single needle is hidden: from 0, the text's beginning, to 1, its end."""

    needles: Annotated[str, Parameter(group=PROMPTS, validator=check_needles)] = "1,4"
    """How many are hidden, and asked for at once; several are spread evenly."""

    questions: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=1, lte=1000))] = 2
    """Texts of each length, depth and number of needles."""

    keep: Annotated[float, Parameter(group=PROMPTS, validator=Number(gte=0.001, lte=1))] = 0.1
    """The keep ratio of compression; the others get as much of the text as it kept."""

    seed: Annotated[int | None, Parameter(group=PROMPTS, validator=Number(gte=0, lte=1 << 62), show_default=False)] = (
        None
    )
    """The texts of another run; else texts that were never sent before."""

    json: Annotated[bool, Parameter(group=SHOWN, negative="", show_default=False)] = False
    """Print JSON, and nothing else, on standard output: every question."""

    plot: Annotated[Path | None, Parameter(group=SHOWN)] = None
    """Draw what came of it to a file, .svg or .png."""

    @property
    def many_lengths(self) -> tuple[int, ...]:
        return parse_whole_numbers(self.lengths, MOST_LENGTH, "a number of tokens")

    @property
    def many_needles(self) -> tuple[int, ...]:
        return parse_whole_numbers(self.needles, len(NAMES), "a number of needles")

    @property
    def many_depths(self) -> tuple[float, ...]:
        return parse_depths(self.depths)
