"""Effects and outcomes of prompt compression: a small model, the prompt scorer, decides which tokens are kept.

The idea is speculative prefill (Liu et al. 2025, github.com/Jingyu6/speculative_prefill). PFlash is its form in the
server Lucebox (github.com/Luce-Org/lucebox), whose way of scoring is used here (`adapters/device/compression/`).
`/props` and the page call it so.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.compression import PromptPart
from effects.ids import DeviceFailed, Side, Span, Tokens


@frozen
class PromptCompressed:
    """The prompt is scored, and the executor has chosen the tokens that are kept.

    Where messages were shortened one by one (`CompressPrompt.apart`), `kept` lists the kept spans of all of these
    messages, and `prompt` is empty.
    """

    prompt: Tokens  # the tokens that are kept; the whole prompt, where nothing could be left out
    kept: tuple[Span, ...]  # spans of the original prompt that are kept
    forced: tuple[Span, ...] = ()  # spans that are kept whatever their scores
    ns: int = 0  # nanoseconds that all of it took on the lane; 0: not measured


@frozen
class PromptScored:
    """A part of the scoring is done: about the share of the work that tokens `[0, stop)` have in it.

    The core asks for the next part with another `CompressPrompt`.
    """

    stop: int


@frozen
class CompressPrompt:
    """Score the next part of a prompt: about as much work as one chunk of `Settings.chunk` tokens.

    A prompt takes several of these effects, one after the other. The first one, with start 0, carries the prompt and
    how much of it to keep. The last one also chooses the tokens that are kept. Between them the executor remembers the
    prompt and the scores, until it has reported `PromptCompressed`, or the work has failed or was abandoned.
    """

    outcomes: ClassVar = (PromptScored, PromptCompressed, DeviceFailed)
    side: ClassVar = Side.DEVICE
    start: int  # the `stop` of the last outcome; 0 in the first effect
    tokens: Tokens = ()  # the prompt
    keep: int = 0  # tokens to keep
    most: int = 0  # tokens that fit the context at most
    parts: tuple[PromptPart, ...] = ()
    apart: bool = False  # shorten each part by itself, to its own ratio; tokens in no part are not scored


@frozen
class KeepFrozen:
    """Remember what messages were frozen to, for later requests that contain them."""

    outcomes: ClassVar = ()
    frozen: tuple[tuple[str, tuple[Span, ...]], ...]  # each (name, spans that are kept, from the message's start on)
