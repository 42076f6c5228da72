"""Arrangements of a server: every pair of values of all options that touch rows, in as few starts as that takes.

`arrangements` makes them with a library (all-pairs testing): most faults that options make together are made by two of
them. `legal` is what the command refuses or cannot mean; the array covers every pair that it allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import TypeAlias

from allpairspy import AllPairs
from attrs import frozen

Values: TypeAlias = dict[str, str]

FAMILIES = ("demo", "demo-hybrid", "llama", "qwen2", "qwen3_moe", "qwen3_next")
RECURRENT = ("demo-hybrid", "qwen3_next")
OPTIONS: Mapping[str, Sequence[str]] = {
    "family": FAMILIES,
    "weights": ("as they are", "int8", "int4", "gguf"),
    "dtype": ("auto", "float32", "bfloat16"),
    "kv dtype": ("auto", "int8", "fp8"),
    "target": ("one", "split", "process", "daemon"),
    "slots": ("1", "2", "4"),
    "pool": ("none", "tight", "wide"),
    "draft": ("none", "chains", "trees"),
    "draft placement": ("here", "process"),
    "draft residency": ("persistent", "request-scoped"),
    "scope": ("off", "full", "auto:4", "192"),
    "codec": ("auto", "zstd", "store"),
    "disk budget": ("8192", "2"),
    "host budget": ("512", "0", "1"),
    "compression": ("off", "always", "auto"),
    "drafter placement": ("here", "process"),
    "freezing": ("off", "on"),
    "chunk": ("0", "64", "256"),
    "checkpoints": ("8", "0"),
    "paranoid": ("off", "on"),
}

# Of two options each: what must hold where both are known. Pairs that break a rule are not in the array.
Rule: TypeAlias = Callable[[Mapping[str, str]], bool]
RULES: Sequence[tuple[tuple[str, str], Rule]] = (
    # Shards in other processes keep whole slots.
    (("target", "pool"), lambda row: row["pool"] == "none" or row["target"] in {"one", "split"}),
    # A daemon serves one model as it was started, so this one is not rounded otherwise.
    (("target", "weights"), lambda row: row["target"] != "daemon" or row["weights"] == "as they are"),
    # Files of llama.cpp are written of the demo alone here.
    (("family", "weights"), lambda row: row["weights"] != "gguf" or row["family"] == "demo"),
    # Drafts are trained for a model; random ones of four layers are made for the others without a state.
    (("family", "draft"), lambda row: row["draft"] == "none" or row["family"] != "qwen3_next"),
    (("draft", "draft placement"), lambda row: row["draft"] != "none" or row["draft placement"] == "here"),
    (("draft", "draft residency"), lambda row: row["draft"] != "none" or row["draft residency"] == "persistent"),
    (
        ("compression", "drafter placement"),
        lambda row: row["compression"] != "off" or row["drafter placement"] == "here",
    ),
    (("compression", "freezing"), lambda row: row["freezing"] == "off" or row["compression"] != "off"),
    # The shortened messages are kept next to the cache on disk.
    (("scope", "freezing"), lambda row: row["freezing"] == "off" or row["scope"] != "off"),
    (("family", "checkpoints"), lambda row: row["checkpoints"] == "8" or row["family"] in RECURRENT),
)


@frozen
class Arrangement:
    """One row of the array: a value of every option."""

    number: int
    values: Values

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    @property
    def answers(self) -> tuple[str, ...]:
        """Return the options that may change an answer. Two arrangements in which these are the same give the same
        answers.
        """
        return tuple(self.values[name] for name in ("family", "weights", "dtype", "kv dtype"))

    def __str__(self) -> str:
        return f"{self.number}: " + ", ".join(f"{name}={value}" for name, value in self.values.items())


def legal(values: Mapping[str, str]) -> bool:
    """Is a row, or the part of it that is known, one that a server takes?"""
    return all(rule(values) for names, rule in RULES if all(name in values for name in names))


def arrangements(seed: int = 0) -> list[Arrangement]:
    """The same ones for the same seed, which says in what order values are tried."""
    random, names = Random(seed), list(OPTIONS)
    mixed = [random.sample(list(OPTIONS[name]), len(OPTIONS[name])) for name in names]
    made = AllPairs(mixed, filter_func=lambda row: legal(dict(zip(names, row, strict=False))))
    found = [dict(zip(names, row, strict=True)) for row in made]
    missing = uncovered(found)
    return [Arrangement(number, row) for number, row in enumerate([*found, *completed(missing, random)])]


def completed(pairs: Sequence[Values], random: Random) -> Iterator[Values]:
    """Rows for pairs that the library has left out, which it may where a filter is narrow."""
    left = list(pairs)
    while left:
        row = dict(left[0])
        for pair in left[1:]:
            if all(row.get(name, value) == value for name, value in pair.items()) and finished(row | pair, random):
                row |= pair
        whole = finished(row, random)
        assert whole is not None, row
        yield whole
        left = [pair for pair in left if not pair.items() <= whole.items()]


def finished(row: Values, random: Random) -> Values | None:
    """The row with a legal value for every option that it lacks; None if there is none."""
    if not legal(row):
        return None
    lacking = next((name for name in OPTIONS if name not in row), None)
    if lacking is None:
        return row
    for value in random.sample(list(OPTIONS[lacking]), len(OPTIONS[lacking])):
        if (whole := finished({**row, lacking: value}, random)) is not None:
            return whole
    return None


def pairs() -> Iterator[Values]:
    """Every pair of values of two options that some legal row has."""
    for one, other in combinations(OPTIONS, 2):
        for first, second in product(OPTIONS[one], OPTIONS[other]):
            pair = {one: first, other: second}
            if finished(pair, Random(0)) is not None:
                yield pair


def uncovered(rows: Sequence[Values]) -> list[Values]:
    """The pairs that none of these rows has."""
    return [pair for pair in pairs() if not any(pair.items() <= row.items() for row in rows)]
