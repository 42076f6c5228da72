"""Where a prompt leaves the likest one that is kept, in words: both texts there, and which message that is in."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from adapters.text.conversation import ChatMessage
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens
from effects.job import Job
from effects.ports import Divergence

SIDE = 40  # characters that are shown before the place, and as many behind it
MOST_UNSHOWN = 64  # messages that the template does not show as they were sent: each is a search of the whole text


@frozen
class Explained:
    """sent, kept: both texts around the place. message: in the conversation as the template is told it."""

    at: int
    tier: str
    sent: str
    kept: str
    message: int | None = None
    role: str | None = None


def explain(diverged: Divergence, job: Job, messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> Explained:
    """Takes its time: as much as decoding the prompt."""
    prompt, at = job.prompt, diverged.at
    before = shown(prompt[max(0, at - SIDE) : at], tokenizer)[-SIDE:]
    sent, kept = (shown(tokens, tokenizer)[:SIDE] for tokens in (prompt[at : at + SIDE], diverged.tokens))
    told = Explained(at, diverged.tier, before + sent, before + kept)
    if not messages:
        return told
    written = tokenizer.decode(prompt, special=True)
    opened = max((cut for cut in job.boundaries if cut <= at), default=0)
    places = (len(tokenizer.decode(prompt[:cut], special=True)) for cut in (opened, at))
    found = message_at(messages, written, *places)
    return told if found is None else evolve(told, message=found, role=messages[found].role)


def shown(tokens: Tokens, tokenizer: Tokenizer) -> str:
    """What was cut in the middle of a character is left out."""
    return tokenizer.decode(tokens, special=True).strip("\ufffd")


def message_at(messages: Sequence[ChatMessage], written: str, opened: int, at: int) -> int | None:
    """The last message that begins at or before the character `at`; None before the first one. Takes its time.

    opened: where the last message before that opens, as far as the template's markers tell. A message that is not shown
    as it was sent belongs to the one before it.
    """
    found, stop, unshown = -1, 0, 0
    for number, message in enumerate(messages):
        shown = (message.content or message.reasoning or (message.calls[0].name if message.calls else "")).strip()
        place = written.find(shown, stop, at + len(shown)) if shown else -1
        if place >= 0:
            found, stop = number, place + len(shown)
            continue
        unshown += 1
        if unshown == MOST_UNSHOWN:
            break
    if 0 < stop < opened <= at and found + 1 < len(messages):
        found += 1  # in how the next one opens
    return found if found >= 0 else None
