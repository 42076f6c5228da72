"""PFlash: let the drafter decide which prompt tokens matter."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, Lane, Span, Tokens


@frozen
class PromptCompressed:
    prompt: Tokens  # what will be served; shorter, or the outcome is a failure
    kept: tuple[Span, ...]  # spans of the original that survived


@frozen
class CompressPrompt:
    outcomes: ClassVar = (PromptCompressed, DeviceFailed)
    lane: ClassVar = Lane.DEVICE
    prompt: Tokens
    keep_permille: int
