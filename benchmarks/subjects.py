"""Prompts by subject, from text that neither the demo nor its draft was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from attrs import evolve
from tokenizers import Tokenizer

from adapters import demo
from effects.ids import Tokens
from training.corpus import read_held_out
from training.draft_evaluate import SUBJECTS, make_prompts
from training.words import Source

NAMES = {
    "code": "code",
    "code of others": "code of other authors",
    "tool calls": "tool calls (JSON)",
    "chat": "chat",
    "retrieval": "key to value, 2048",
}


@cache
def held_out_sources() -> tuple[Source, Source]:
    """Return the held-out sources of the library, and of packages that training never saw."""
    texts = read_held_out()
    return Source(texts.stdlib), Source(texts.apart)


def prompts(kinds: Sequence[str], count: int, longest: int) -> dict[str, list[Tokens]]:
    """`count` prompts of each kind, the same ones every time, of at most `longest` tokens."""
    tokenizer = Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    library, apart = held_out_sources()
    subjects = {subject.name: subject for subject in SUBJECTS}
    found: dict[str, list[Tokens]] = {}
    for kind in kinds:
        subject = subjects[NAMES[kind]]
        short = evolve(subject, room=min(subject.room, longest))
        source = apart if subject.apart else library
        found[kind] = [tuple(prompt[-longest:]) for prompt in make_prompts(short, tokenizer, source, count)]
    return found
