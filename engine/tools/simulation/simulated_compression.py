"""Simulates prompt compression: cuts logged prompts into messages, and guesses how much of each a scorer would keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from attrs import define, evolve, field

from adapters.http.history.frozen_messages import FrozenMessages, MessageFreezing
from effects.compression import WHOLE, Compression, PromptPart, select_tokens
from effects.ids import Span, Tokens
from effects.prompt_compression import CompressPrompt, PromptCompressed

# From this many messages on, one of them is an answer.
TURNS = 3


@define(eq=False)
class SimulatedCompression:
    """Compresses prompts as the server would. The text of frozen messages outlives restarts."""

    asked: Compression
    longest: int  # tokens that a scorer can handle
    frozen: FrozenMessages = field(factory=lambda: FrozenMessages(scorer_identity="simulated"))

    def build_compression(self, prompt: Tokens, boundaries: Sequence[int]) -> Compression:
        """Return the compression of a prompt. boundaries: positions in tokens at which its messages open.

        Logs have no roles, so every message counts as the user's. The first message is never shortened, whatever its
        role (`find_aged_range`), so it stands for the system's. A prompt of more than TURNS messages continues a
        conversation.
        """
        if self.asked.mode == "off":
            return self.asked
        edges = sorted({0, *boundaries, len(prompt)})
        parts = tuple(PromptPart("user", start, stop) for start, stop in pairwise(edges))
        asked = evolve(self.asked, parts=parts, continues=len(parts) > TURNS)
        return MessageFreezing(self.frozen, lambda _: asked.keep, self.longest).apply(asked, prompt, len(parts))


def shorten_prompt(asked: CompressPrompt, ns: int) -> PromptCompressed:
    """Return as much of a prompt as a scorer keeps: a quarter of it from the front, the rest from the end."""
    if asked.apart:
        kept = tuple(span for part in asked.parts for span in list_kept_ends(part.start, part.stop, part.keep))
        return PromptCompressed((), kept, ns=ns)
    length = len(asked.tokens)
    spans = tuple(list_kept_ends(0, length, min(asked.keep, asked.most) * WHOLE // length))
    return PromptCompressed(select_tokens(asked.tokens, spans), spans, ns=ns)


def list_kept_ends(start: int, stop: int, keep: int) -> Iterator[Span]:
    """Yield the spans that are kept. keep: thousandths."""
    count = max(1, (stop - start) * keep // WHOLE)
    front = count // 4
    yield from (span for span in ((start, start + front), (stop - count + front, stop)) if span[0] < span[1])


def count_scored(asked: CompressPrompt) -> int:
    """Return the tokens that are scored."""
    return sum(part.length for part in asked.parts) if asked.apart else len(asked.tokens)
