"""Types, parsers and checks of options. Each mistake is one sentence that says what is accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter, Token

from adapters.models.kernels.formats.row_names import read_pair
from adapters.store.shared.store_url import StoreUnusable, check_url
from effects.scope import ACCEPTED_FORMS, parse_scope
from engine.settings.placement import ELSEWHERE, read_devices, read_listen, read_location, read_weights

# The panels of `--help`, in the order in which they stand there: what most people need comes first.
FLEET = Group("Fleet", sort_key=0)
MODEL = Group("Model", sort_key=1)
SERVER = Group("Server", sort_key=2)
CACHE = Group("Cache", sort_key=3)
ENGINE = Group("Engine", sort_key=4)
DRAFT = Group("Speculation", sort_key=5)
COMPRESSION = Group("Compression", sort_key=6)
LOG = Group("Log", sort_key=7)
TRACE = Group("Trace", sort_key=8)

Device: TypeAlias = str  # auto | cpu | cuda | cuda:N
ToolParser: TypeAlias = Literal[
    "auto",
    "hermes",
    "qwen-xml",
    "seed-xml",
    "minimax-xml",
    "glm-xml",
    "mistral-json",
    "mistral",
    "harmony",
    "llama3-json",
    "pythonic",
    "gemma4",
    "none",
]
ReasoningParser: TypeAlias = Literal["auto", "think", "seed", "mistral", "gemma4", "none"]
Residency: TypeAlias = Literal["auto", "persistent", "request-scoped"]
Shell: TypeAlias = Literal["bash", "zsh", "fish"]
Quiet: TypeAlias = Annotated[bool, Parameter(name=("--quiet", "-q"), negative="", show_default=False)]
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[^\s/?#@\[\]:]+)(:\d{1,5})?")
FLAT = Parameter(name="*")
"""The fields of a group of options are flags of their own, without the name of the group before them."""


def flag(group: Group | str, **more: Any) -> Parameter:
    return Parameter(group=group, **more)


def parse_integer(_: Any, tokens: Sequence[Token]) -> int:
    """Parse an integer of digits and a sign. cyclopts would round 1.5, and Python would read 1_0."""
    text = tokens[0].value
    if not (text.isascii() and text.lstrip("+-").isdecimal() and len(text) < 40):
        raise ValueError(f"{text[:40]!r} is not an integer")
    return int(text)


def parse_residency(_: Any, tokens: Sequence[Token]) -> Residency:
    match tokens[0].value:
        case "auto" | "persistent" | "request-scoped" as policy:
            return policy
        case "request_scoped":
            return "request-scoped"
        case _:
            raise ValueError("Choose from: auto, persistent, request-scoped.")


def check_store(_: Any, url: str) -> None:
    """Raise ValueError if a URL cannot name a store; "" names none."""
    try:
        if url:
            check_url(url)
    except StoreUnusable as error:
        raise ValueError(str(error)) from error


def check_device(_: Any, value: str) -> None:
    kind, _, index = value.partition(":")
    if kind not in {"auto", "cpu", "cuda"} or (index and not (kind == "cuda" and index.isdecimal())):
        raise ValueError("Choose from: auto, cpu, cuda, cuda:N.")


def check_devices(_: Any, value: str) -> None:
    if value:
        read_devices(value)


def check_listen(_: Any, value: str) -> None:
    read_listen(value)


def check_draft_device(_: Any, value: str) -> None:
    """Check the device of a draft or of a prompt scorer."""
    if value.partition(":")[0] in {"auto", "cpu", "cuda"}:
        check_device(_, value)
        return
    try:
        apart = not value or read_location(value).is_remote
    except ValueError:
        apart = False
    if not apart:
        raise ValueError(f"{value[:40]!r} is no device of a draft. Accepted: auto, cpu, cuda or cuda:N; {ELSEWHERE}.")


def check_curve(_: Any, value: str) -> None:
    if value:
        read_curve(value)


def read_curve(text: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of tokens and thousandths, ascending. Raises ValueError."""
    points = list[tuple[int, int]]()
    for point in text.split(","):
        tokens, _, ratio = point.strip().partition(":")
        number = re.fullmatch(r"0?\.\d{1,6}|1(\.0*)?|0\.\d+", ratio)
        if not (tokens.isascii() and tokens.isdecimal() and len(tokens) < 8) or not number or float(ratio) < 0.001:
            raise ValueError(
                f"{point[:40]!r} is not TOKENS:RATIO; accepted: such as 10000:0.5, ratios from 0.001 to 1."
            )
        points.append((int(tokens), round(float(ratio) * 1000)))
    if [tokens for tokens, _ in points] != sorted({tokens for tokens, _ in points}):
        raise ValueError("Must name every number of tokens once, in ascending order.")
    return tuple(points)


def check_weights(_: Any, value: str) -> None:
    if value:
        read_weights(value)


def check_chunk(_: Any, value: int) -> None:
    if value and (value < 64 or value & (value - 1) or value > 4096):
        raise ValueError("Must be 0 (the device's default) or a power of two from 64 to 4096.")


def check_kv_dtype(_: Any, value: str) -> None:
    read_pair(value)


def check_experts(_: Any, value: str) -> None:
    read_experts(value)


def read_experts(text: str) -> int | None:
    """Return the bytes of the device for experts in host memory. Raises ValueError.

    0: as many as fit. None: host memory keeps no experts.
    """
    match = re.fullmatch(r"device|host(?::(\d{1,4}(?:\.\d{1,3})?))?", text)
    if match is None or (match[1] and not float(match[1])):
        raise ValueError("Must be device, host, or host:N with N GiB on the device, such as host:8.")
    return None if text == "device" else int(float(match[1] or 0) * (1 << 30))


def check_cpu_experts(_: Any, value: str) -> None:
    read_cpu_experts(value)


def read_cpu_experts(text: str) -> int | None:
    """Return the number of layers whose experts the host computes; None: measured times decide. Raises ValueError."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 5):
        raise ValueError("Must be auto, or a number of layers, such as 24.")
    return int(text)


def check_host(_: Any, value: str) -> None:
    if not value or any(letter.isspace() or letter == "/" for letter in value):
        raise ValueError("Must be a host name or an address to listen on, such as 127.0.0.1 or ::1.")


def check_scope(_: Any, value: str) -> None:
    try:
        parse_scope(value)
    except ValueError:
        raise ValueError(f"Must be {ACCEPTED_FORMS}.") from None


def check_names(_: Any, value: tuple[str, ...]) -> None:
    for name in value:
        check_host(_, name)
        if name.count(":") == 1:
            raise ValueError("Must be a name without a port.")


def check_keys(_: Any, value: tuple[str, ...]) -> None:
    if any(not key or not key.isascii() or not key.isprintable() for key in value):
        raise ValueError("Must be printable ASCII, and not empty.")


def check_aliases(_: Any, value: tuple[str, ...]) -> None:
    for name in value:
        if not name.strip() or not name.isprintable() or len(name) > 200:
            raise ValueError("Must be a name of up to 200 printable characters.")


def check_origins(_: Any, value: tuple[str, ...]) -> None:
    for origin in value:
        if origin != "*" and not ORIGIN.fullmatch(origin.lower()):
            raise ValueError("Must be what a browser sends, such as https://page.example:8443, without a path, or *.")
