"""Builds long texts with facts hidden in them, and shortens them without looking at their content."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from attrs import frozen

from engine.tools.bench.bench_prompts import WORDS

NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ida", "Jonas", "Kate", "Leo", "Maria"),
    *("Nina", "Oscar", "Paula", "Ruth", "Simon", "Tina", "Victor"),
)
LINE = 12  # words


@frozen
class Needle:
    """A fact: the number of a person."""

    person: str
    number: int

    @property
    def line(self) -> str:
        return f"The secret number of {self.person} is {self.number}."


@frozen
class Haystack:
    """The lines of a text, and the question about its needles."""

    lines: tuple[str, ...]
    needles: tuple[Needle, ...]

    @property
    def question(self) -> str:
        if len(self.needles) == 1:
            return f"What is the secret number of {self.needles[0].person}?"
        whose = [f"the secret number of {needle.person}" for needle in self.needles]
        return f"What is {', '.join(whose[:-1])} and {whose[-1]}?"

    def score_answer(self, answer: str) -> float:
        """Return the share of the needles whose numbers are in an answer."""
        return sum(str(needle.number) in answer for needle in self.needles) / len(self.needles)

    def text(self, lines: Sequence[str] | None = None) -> str:
        return "\n".join((*(self.lines if lines is None else lines), "", self.question))


def build_haystack(draw: Random, words: int, depths: Sequence[float]) -> Haystack:
    """Return a text of about this many words with a needle at each depth, from 0 (the beginning) to 1 (the end)."""
    lines = [
        f"{' '.join(draw.choices(WORDS, k=LINE))}.".capitalize() for _ in range(max(len(depths), round(words / LINE)))
    ]
    whose = draw.sample(NAMES, len(depths))
    needles = tuple(Needle(who, draw.randrange(1000, 10_000)) for who in whose)
    for depth, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: -pair[0]):
        lines.insert(round(depth * len(lines)), needle.line)
    return Haystack(tuple(lines), needles)


def keep_last(hay: Haystack, share: float) -> list[str]:
    """Return the last lines that make up this share of the text."""
    kept = list[str]()
    budget = share * count_words(hay.lines)
    for line in reversed(hay.lines):
        budget -= len(line) + 1
        if budget < 0:
            break
        kept.insert(0, line)
    return kept


def keep_random(hay: Haystack, share: float, draw: Random) -> list[str]:
    """Return random lines that make up this share of the text, in their order."""
    kept = set[int]()
    budget = share * count_words(hay.lines)
    for at in draw.sample(range(len(hay.lines)), len(hay.lines)):
        budget -= len(hay.lines[at]) + 1
        if budget < 0:
            break
        kept.add(at)
    return [line for at, line in enumerate(hay.lines) if at in kept]


def count_words(lines: Sequence[str]) -> int:
    return sum(len(line) + 1 for line in lines)
