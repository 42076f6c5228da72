"""The options of `rekindle bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

from attrs import field, frozen
from cyclopts import Group, Parameter
from cyclopts.validators import Number

from engine.settings.option_types import FLAT

ASKED = Group("Server", sort_key=1)
LOAD = Group("Load", sort_key=2)
PROMPTS = Group("Requests", sort_key=3)
SHOWN = Group("Output", sort_key=4)
# Each stream is a connection, and most systems give a process 1,024 descriptors or more.
MOST_STREAMS = 1024
MOST_LENGTH = 1 << 20  # tokens of a prompt or answer
MOST_RATE = 10_000.0


def parse_whole_numbers(value: str, most: int, noun: str) -> tuple[int, ...]:
    words = [word.strip() for word in value.split(",")]
    if not all(word.isascii() and word.isdigit() and 1 <= int(word) <= most for word in words):
        raise ValueError(f"Must be {noun} from 1 to {most}. Separate several with commas.")
    return tuple(dict.fromkeys(map(int, words)))


def check_concurrency(_: Any, value: str) -> None:
    parse_whole_numbers(value, MOST_STREAMS, "a number of streams")


def parse_rates(value: str) -> tuple[float, ...]:
    try:
        rates = tuple(dict.fromkeys(float(word) for word in value.split(","))) if value else ()
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate <= MOST_RATE for rate in rates):
        raise ValueError(f"Must be requests a second, up to {MOST_RATE:g}. Separate several with commas.")
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
class MeasuredServer:
    """The server that is measured, and how it is asked."""

    url: Annotated[str, Parameter(group=ASKED, validator=check_url)] = "http://127.0.0.1:8000"
    """Address of the server; /v1 is added."""

    api: Annotated[Literal["completions", "chat"], Parameter(group=ASKED)] = "completions"
    """The endpoint to call."""

    model: Annotated[str, Parameter(group=ASKED, show_default=False)] = ""
    """Model name in the requests. By default the first one that the server lists."""

    api_key: Annotated[str, Parameter(group=ASKED, env_var="OPENAI_API_KEY", show_default=False)] = ""
    """API key, sent as a bearer token."""

    timeout: Annotated[float, Parameter(group=ASKED, validator=Number(gt=0, lte=86_400))] = 600.0
    """Seconds without a byte after which a request counts as failed."""

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@frozen(kw_only=True)
class ArrivalOptions:
    """The arrival of requests: by streams, or at a rate."""

    concurrency: Annotated[str, Parameter(group=LOAD, validator=check_concurrency)] = "1"
    """Number of concurrent streams. Each stream sends its next request when the last one is answered. Several numbers
    with commas are measured one after the other."""

    rate: Annotated[str, Parameter(group=LOAD, validator=check_rate, show_default=False)] = ""
    """Requests a second instead of streams. They arrive at random (Poisson), whether or not earlier ones are
    answered."""

    requests: Annotated[int, Parameter(group=LOAD, validator=Number(gte=0, lte=1 << 20), show_default=False)] = 0
    """Requests at each level. By default four for each stream and at least 8, or 32 with --rate."""

    warm_up: Annotated[int, Parameter(group=LOAD, validator=Number(gte=0, lte=1024))] = 1
    """Requests of each stream before a level that are not counted."""

    @property
    def streams(self) -> tuple[int, ...]:
        return parse_whole_numbers(self.concurrency, MOST_STREAMS, "a number of streams")

    @property
    def rates(self) -> tuple[float, ...]:
        return parse_rates(self.rate)


@frozen(kw_only=True)
class RequestOptions:
    """The requests: their prompts, the lengths of their answers, and their other fields."""

    prompt_tokens: Annotated[str, Parameter(group=PROMPTS, validator=check_lengths)] = "512"
    """Length of prompts, or a range such as 100-2000."""

    answer_tokens: Annotated[str, Parameter(group=PROMPTS, validator=check_lengths)] = "128"
    """Length of answers, or a range. Servers that know `ignore_eos` do not end answers earlier."""

    shared_prefix: Annotated[int, Parameter(group=PROMPTS, validator=Number(gte=0, lte=MOST_LENGTH))] = 0
    """Number of tokens at the front that all prompts share, at all levels."""

    log: Annotated[
        tuple[Path, ...], Parameter(group=PROMPTS, consume_multiple=True, negative="", show_default=False)
    ] = ()
    """Logs of requests, in a format that `rekindle simulate` reads. Lengths and shared parts of prompts come from
    there."""

    lengths_only: Annotated[bool, Parameter(group=PROMPTS, negative="", show_default=False)] = False
    """Take only the lengths from the logs. Prompts share nothing."""

    words: Annotated[bool, Parameter(group=PROMPTS, negative="", show_default=False)] = False
    """Send the prompts of completions as text, about one word for a token, instead of token ids. Chat always sends
    text."""

    temperature: Annotated[float, Parameter(group=PROMPTS, validator=Number(gte=0, lte=2))] = 0.0
    """Sampling temperature."""

    body: Annotated[str, Parameter(group=PROMPTS, validator=check_body)] = '{"ignore_eos": true}'
    """Further fields of every request, as a JSON object."""

    seed: Annotated[int | None, Parameter(group=PROMPTS, validator=Number(gte=0, lte=1 << 62), show_default=False)] = (
        None
    )
    """Repeat the lengths, arrivals and prompts of an earlier run. By default all prompts are new."""

    @property
    def more(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.body))


@frozen(kw_only=True)
class LoadOutput:
    """The form of the result."""

    json: Annotated[bool, Parameter(group=SHOWN, negative="", show_default=False)] = False
    """Print only JSON on standard output: the figures, and every request."""

    plot: Annotated[Path | None, Parameter(group=SHOWN)] = None
    """Draw the result to this file, .svg or .png."""


@frozen(kw_only=True)
class LoadOptions:
    """Options of `rekindle bench serve`."""

    server: Annotated[MeasuredServer, FLAT] = field(factory=MeasuredServer)
    arrivals: Annotated[ArrivalOptions, FLAT] = field(factory=ArrivalOptions)
    requests: Annotated[RequestOptions, FLAT] = field(factory=RequestOptions)
    output: Annotated[LoadOutput, FLAT] = field(factory=LoadOutput)
