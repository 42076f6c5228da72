"""PFlash: a small model, the prompt scorer, decides which tokens of a prompt are kept."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.compression import PromptPart
from effects.ids import DeviceFailed, Side, Span, Tokens


@frozen
class PromptCompressed:
    """The prompt is scored, and it is decided what is kept.

    Where messages were shortened one by one (`apart`), `kept` says what is kept of all of them, and `prompt` is empty.
    """

    prompt: Tokens  # the tokens that are kept; the whole prompt, where nothing could be left out
    kept: tuple[Span, ...]  # spans of the original prompt that are kept
    forced: tuple[Span, ...] = ()  # spans that are kept whatever their scores
    ns: int = 0  # nanoseconds that all of it took on the lane; 0: not measured


@frozen
class PromptScored:
    """Part of the work is done, as much as scoring tokens `[0, stop)` would take. More has to be asked for."""

    stop: int


@frozen
class CompressPrompt:
    """Score a prompt for as long as C tokens take. The last of these effects also picks what is kept.

    The first one, with start 0, carries the prompt and how much of it to keep. The executor remembers that, together
    with the scores, until it has reported what is kept, or the work has failed or was abandoned.
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
