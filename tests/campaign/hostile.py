"""Well-formed things, and ways to spoil them that a parser has to get through: structure first, then bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

INTEGERS = (-1, 0, 1, 2, 63, 255, 4096, 2**31, 2**53, 2**63, 2**64, 10**30)
VALUES: tuple[Any, ...] = (
    *(None, True, False, *INTEGERS),
    *(-0.0, 1.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "is", "\ud800", "\x00", "../x", "1e999", "x" * 300, "<|im_end|>", "{% for a in b %}"),
    *([], {}, [[]], [{}], [1], ["x"], {"is": "Decoded"}, {"": None}),
)


def spoilt_cases(check: Callable[[Random], None], examples: int) -> None:
    """`check` with so many seeds, the same ones each time."""
    chosen = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    chosen(given(st.randoms(use_true_random=False))(check))()  # type: ignore[misc]


def iterate_values(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from iterate_values(value[key])
    elif isinstance(value, list):
        for at in range(min(len(value), 40)):
            yield value, at
            yield from iterate_values(value[at])


def spoilt(value: Any, random: Random, values: tuple[Any, ...] = VALUES) -> Any:
    """A copy in which something, somewhere, is another value, gone, doubled, moved or nested."""
    whole = [deepcopy(value)]
    for _ in range(random.randint(1, 3)):
        container, key = random.choice(list(iterate_values(whole)))
        match random.randint(0, 5):
            case 0 | 1:
                container[key] = deepcopy(random.choice(values))
            case 2 if container is not whole:
                del container[key]
            case 3 if isinstance(container, list) and container is not whole:
                container.insert(random.randint(0, len(container)), deepcopy(container[key]))
            case 4 if isinstance(container, dict):
                container[random.choice(("x", "", *container))] = container[key]
            case 5:
                container[key] = [container[key]] * random.choice((1, 2, 50))
            case _:
                container[key] = deepcopy(random.choice(list(iterate_values(whole)))[0])
    return whole[0]


def spoilt_bytes(raw: bytes, random: Random) -> bytes:
    """Bits flipped, ends cut, parts doubled, left out or replaced."""
    data = bytearray(raw)
    for _ in range(random.randint(1, 3)):
        at, length = random.randint(0, len(data)), random.choice((1, 2, 8, 100))
        match random.randint(0, 4):
            case 0 if at < len(data):
                data[at] ^= 1 << random.randint(0, 7)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at : at + length]
            case 3:
                del data[at : at + length]
            case _:
                data[at : at + length] = random.choice(
                    (b"\0" * length, b"\xff" * length, b"[" * 2000, b'"', b"\n", b"9" * 5000)
                )
    return bytes(data)


def text_of(value: Any) -> str:
    """Return the value as JSON, with everything that Python's parser takes for it: NaN, and halves of
    surrogate pairs.
    """
    return json.dumps(value)
