"""Explains a cache miss: where a prompt diverges from the longest match in the cache, as texts and as a message."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from adapters.text.conversation import ChatMessage
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens
from effects.job import Job
from effects.ports import Divergence

CONTEXT_CHARS = 40  # characters that are shown before the divergence, and as many after it
# Messages that the template does not show as they were sent. Each costs a search of the whole text.
MAX_UNSHOWN_MESSAGES = 64


@frozen
class MissExplanation:
    """The position at which a prompt diverges from a cached one.

    at: the token position. sent, kept: the texts of both prompts around it.
    message, role: the message in which it is, counted in the conversation that the template renders.
    """

    at: int
    tier: str
    sent: str
    kept: str
    message: int | None = None
    role: str | None = None


def explain_miss(
    diverged: Divergence, job: Job, messages: Sequence[ChatMessage], tokenizer: Tokenizer
) -> MissExplanation:
    """Return the explanation of one divergence. This takes as long as decoding the prompt: call it in a thread."""
    prompt = job.prompt
    at = diverged.at
    before = decode_whole_characters(prompt[max(0, at - CONTEXT_CHARS) : at], tokenizer)[-CONTEXT_CHARS:]
    sent, kept = (
        decode_whole_characters(tokens, tokenizer)[:CONTEXT_CHARS]
        for tokens in (prompt[at : at + CONTEXT_CHARS], diverged.tokens)
    )
    explanation = MissExplanation(at, diverged.tier, before + sent, before + kept)
    if not messages:
        return explanation
    written = tokenizer.decode(prompt, special=True)
    opened = max((cut for cut in job.boundaries if cut <= at), default=0)
    lengths = (len(tokenizer.decode(prompt[:cut], special=True)) for cut in (opened, at))
    found = find_message_index(messages, written, *lengths)
    return explanation if found is None else evolve(explanation, message=found, role=messages[found].role)


def decode_whole_characters(tokens: Tokens, tokenizer: Tokenizer) -> str:
    """Decode tokens, without characters at either end of which the tokens hold only a part."""
    return tokenizer.decode(tokens, special=True).strip("\ufffd")


def find_message_index(messages: Sequence[ChatMessage], written: str, opened: int, at: int) -> int | None:
    """Return the last message that begins at or before the character `at`. None: it is before the first message.

    This is slow: it searches the text once for each message. A message that the template does not show as it was sent
    counts as part of the message before it.

    opened: the character at which the last message before `at` opens, according to the template's markers.
    """
    found = -1
    stop = 0
    unshown = 0
    for number, message in enumerate(messages):
        shown = (message.content or message.reasoning or (message.calls[0].name if message.calls else "")).strip()
        found_at = written.find(shown, stop, at + len(shown)) if shown else -1
        if found_at >= 0:
            found = number
            stop = found_at + len(shown)
            continue
        unshown += 1
        if unshown == MAX_UNSHOWN_MESSAGES:
            break
    if 0 < stop < opened <= at and found + 1 < len(messages):
        found += 1  # `at` is in the text that opens the next message
    return found if found >= 0 else None
