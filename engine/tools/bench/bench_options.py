"""The options of `rekindle bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from attrs import frozen
from cyclopts import Group, Parameter
from cyclopts.validators import Number

ASKED = Group("Who is asked", sort_key=1)
LOAD = Group("How much at once", sort_key=2)
PROMPTS = Group("What is sent", sort_key=3)
SHOWN = Group("Output", sort_key=4)
# Each stream is a connection, and most systems give a process 1,024 descriptors or more.
MOST_STREAMS = 1024
MOST_LENGTH = 1 << 20  # tokens of a prompt or answer
MOST_RATE = 10_000.0


def parse_whole_numbers(value: str, most: int, noun: str) -> tuple[int, ...]:
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= most for word in words):
        raise ValueError(f"Must be {noun} from 1 to {most}; several with commas between them.")
    return tuple(dict.fromkeys(map(int, words)))


def check_concurrency(_: Any, value: str) -> None:
    parse_whole_numbers(value, MOST_STREAMS, "a number of streams")


def parse_rates(value: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(word) for word in value.split(","))) if value else ()
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate <= MOST_RATE for rate in rates):
        raise ValueError(f"Must be requests a second, up to {MOST_RATE:g}; several with commas between them.")
    return rates


def check_rate(_: Any, value: str) -> None:
    parse_rates(value)


def parse_lengths(value: str) -> tuple[int, int]:
    """Parse "512" or "100-2000". Raises ValueError."""
    low, dash, high = value.partition("-")
    words = (low, high if dash else low)
    if not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError("Must be a number of tokens, or two with a dash between them, as in 100-2000.")
    least, most = map(int, words)
    if not 1 <= least <= most <= MOST_LENGTH:
        raise ValueError(f"Must be from 1 to {MOST_LENGTH} tokens, the smaller number first.")
    return least, most


def check_lengths(_: Any, value: str) -> None:
    parse_lengths(value)


def check_url(_: Any, value: str) -> None:
    try:
        found = urlsplit(value)
        fine = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        fine = False
    if not fine or found.query or found.fragment:
        raise ValueError("Must be like http://127.0.0.1:8000.")


def check_body(_: Any, value: str) -> None:
    try:
        fine = isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        fine = False
    if not fine:
        raise ValueError('Must be a JSON object, like {"ignore_eos": true}.')


@frozen(kw_only=True)
class LoadOptions:
    """Options of `rekindle bench serve`."""

    url: Annotated[str, Parameter(group=ASKED, validator=check_url)] = "http://127.0.0.1:8000"
    """Where the server is; /v1 is added."""

    api: Annotated[Literal["completions", "chat"], Parameter(group=ASKED)] = "completions"
    """Which endpoint."""

    model: Annotated[str, Parameter(group=ASKED, show_default=False)] = ""
    """Model to name in requests; else the first one that the server lists."""

    api_key: Annotated[str, Parameter(group=ASKED, env_var="OPENAI_API_KEY", show_default=False)] = ""
    """Sent as a bearer token."""

    timeout: Annotated[float, Parameter(group=ASKED, validator=Number(gt=0, lte=86_400))] = 600.0
    """Seconds without a byte after which a request has failed."""

    concurrency: Annotated[str, Parameter(group=LOAD, validator=check_concurrency)] = "1"
    """Streams at once, each with its next request when its last one is answered; with commas, levels one by one."""

    rate: Annotated[str, Parameter(group=LOAD, validator=check_rate, show_default=False)] = ""
    """Instead: requests a second, which arrive at random (Poisson) whether or not others are answered."""

    requests: Annotated[int, Parameter(group=LOAD, validator=Number(gte=0, lte=1 << 20), show_default=False)] = 0
    """So many a level; else four for each stream and no less than 8, or 32 at a rate."""

    warm_up: Annotated[int, Parameter(group=LOAD, validator=Number(gte=0, lte=1024))] = 1
    """Requests of each stream before a level that are not counted."""

    prompt_tokens: Annotated[str, Parameter(group=PROMPTS, validator=check_lengths)] = "512"
    """Length of prompts, or two with a dash: evenly between them."""

    answer_tokens: Annotated[str, Parameter(group=PROMPTS, validator=check_lengths)] = "128"
    """Length of answers, likewise; end tokens are ignored by servers that know `ignore_eos`."""

    shared_prefix: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=0, lte=MOST_LENGTH))] = 0
    """So many tokens at the front of all prompts are the same, at all levels."""

    log: Annotated[
        tuple[Path, ...], Parameter(group=PROMPTS, consume_multiple=True, negative="", show_default=False)
    ] = ()
    """Logs of requests, as `rekindle simulate` reads them: lengths, and what prompts share, come from there."""

    lengths_only: Annotated[bool, Parameter(group=PROMPTS, negative="", show_default=False)] = False
    """Of logs take the lengths, and share nothing."""

    words: Annotated[bool, Parameter(group=PROMPTS, negative="", show_default=False)] = False
    """Send completions' prompts as text, about one word a token, not as token ids. Chat always does."""

    temperature: Annotated[float, Parameter(group=PROMPTS, validator=Number(gte=0, lte=2))] = 0.0
    """Of sampling."""

    body: Annotated[str, Parameter(group=PROMPTS, validator=check_body)] = '{"ignore_eos": true}'
    """More fields of every request, as JSON."""

    seed: Annotated[int | None, Parameter(group=PROMPTS, validator=Number(gte=0, lte=1 << 62), show_default=False)] = (
        None
    )
    """Lengths, arrivals and prompts again as in another run; else prompts that were never sent before."""

    json: Annotated[bool, Parameter(group=SHOWN, negative="", show_default=False)] = False
    """Print JSON, and nothing else, on standard output: figures, and every request."""

    plot: Annotated[Path | None, Parameter(group=SHOWN)] = None
    """Draw what came of it to a file, .svg or .png."""

    @property
    def streams(self) -> tuple[int, ...]:
        return parse_whole_numbers(self.concurrency, MOST_STREAMS, "a number of streams")

    @property
    def rates(self) -> tuple[float, ...]:
        return parse_rates(self.rate)

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def more(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.body))
