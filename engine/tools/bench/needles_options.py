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
        raise ValueError("Must be a number from 0, the start of the text, to 1, its end. Separate several with commas.")
    return depths


@frozen(kw_only=True)
class NeedleOptions:
    """Options of `rekindle bench needles`."""

    url: Annotated[str, Parameter(group=ASKED, validator=check_url)] = "http://127.0.0.1:8000"
    """Address of a Rekindle server with a --prefill-drafter; /v1 is added."""

    model: Annotated[str, Parameter(group=ASKED, show_default=False)] = ""
    """Model name in the requests. By default the first one that the server lists."""

    api_key: Annotated[str, Parameter(group=ASKED, env_var="OPENAI_API_KEY", show_default=False)] = ""
    """API key, sent as a bearer token."""

    timeout: Annotated[float, Parameter(group=ASKED, validator=Number(gt=0, lte=86_400))] = 600.0
    """Seconds without an answer after which a question counts as failed."""

    lengths: Annotated[str, Parameter(group=PROMPTS, validator=check_token_counts)] = "2000,6000"
    """Lengths of the texts in tokens, with commas between them."""

    depths: Annotated[str, Parameter(group=PROMPTS, validator=check_depths)] = "0,0.25,0.5,0.75,1"
    """Where a single needle is hidden: from 0, the start of the text, to 1, its end."""

    needles: Annotated[str, Parameter(group=PROMPTS, validator=check_needles)] = "1,4"
    """How many needles are hidden and asked for at once. Several are spread evenly."""

    questions: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=1, lte=1000))] = 2
    """Number of texts for each length, depth and number of needles."""

    keep: Annotated[float, Parameter(group=PROMPTS, validator=Number(gte=0.001, lte=1))] = 0.1
    """Keep ratio of compression. The other methods get as much of the text as compression kept."""

    seed: Annotated[int | None, Parameter(group=PROMPTS, validator=Number(gte=0, lte=1 << 62), show_default=False)] = (
        None
    )
    """Repeat the texts of an earlier run. By default all texts are new."""

    json: Annotated[bool, Parameter(group=SHOWN, negative="", show_default=False)] = False
    """Print only JSON on standard output: every question."""

    plot: Annotated[Path | None, Parameter(group=SHOWN)] = None
    """Draw the result to this file, .svg or .png."""

    @property
    def many_lengths(self) -> tuple[int, ...]:
        return parse_whole_numbers(self.lengths, MOST_LENGTH, "a number of tokens")

    @property
    def many_needles(self) -> tuple[int, ...]:
        return parse_whole_numbers(self.needles, len(NAMES), "a number of needles")

    @property
    def many_depths(self) -> tuple[float, ...]:
        return parse_depths(self.depths)
