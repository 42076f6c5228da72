"""PFlash: let the drafter decide which prompt tokens matter."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.compression import PromptPart
from effects.ids import DeviceFailed, Side, Span, Tokens


@frozen
class PromptCompressed:
    """Where messages were shortened one by one, `kept` says what is kept of all of them, and `prompt` is empty."""

    prompt: Tokens  # what will be served; the prompt as it was, where nothing could be left out
    kept: tuple[Span, ...]  # spans of the original that survived
    forced: tuple[Span, ...] = ()  # those of them that had to, whatever their scores
    ns: int = 0  # what all of it took on the lane; 0: not measured


@frozen
class PromptScored:
    """So much is done as if tokens `[0, stop)` had been scored, and the others had not; more follows."""

    stop: int


@frozen
class CompressPrompt:
    """Go on scoring a prompt: as much work as C tokens are; with the last of it, pick what is kept.

    The first ask, with start 0, says all there is to say. It is remembered with what was scored until the prompt that
    will be served is told, or the work has failed or was abandoned.
    """

    outcomes: ClassVar = (PromptScored, PromptCompressed, DeviceFailed)
    side: ClassVar = Side.DEVICE
    start: int  # as the last outcome said
    tokens: Tokens = ()  # the prompt
    keep: int = 0  # of its tokens, so many
    most: int = 0  # no more than these fit
    parts: tuple[PromptPart, ...] = ()
    apart: bool = False  # shorten each part by itself, to its own ratio; what is in none is not looked at


@frozen
class KeepFrozen:
    """What messages were frozen to, for later requests that have them, too: by name, spans from their start on."""

    outcomes: ClassVar = ()
    frozen: tuple[tuple[str, tuple[Span, ...]], ...]
