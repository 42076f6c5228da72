"""PFlash: let the drafter decide which prompt tokens matter."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, Side, Span, Tokens


@frozen
class PromptCompressed:
    prompt: Tokens  # what will be served; shorter, or the outcome is a failure
    kept: tuple[Span, ...]  # spans of the original that survived


@frozen
class PromptScored:
    """Of the prompt, tokens `[0, stop)`; more follow."""

    stop: int
    ns: int = 0  # what these took on the lane; 0: not measured


@frozen
class CompressPrompt:
    """Score the next tokens of a prompt, one chunk, at most C of them; with its last ones, pick what is kept.

    What was scored of a request's prompt before is remembered, from `start` 0 on, until the prompt that will be served
    is told, or the work has failed or was abandoned.
    """

    outcomes: ClassVar = (PromptScored, PromptCompressed, DeviceFailed)
    side: ClassVar = Side.DEVICE
    tokens: Tokens  # `[start, start + len(tokens))` of the prompt
    start: int
    total: int  # tokens of the prompt
    keep_permille: int
