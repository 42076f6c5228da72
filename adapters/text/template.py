"""Renders chat templates. In the result, control tokens that the template wrote differ from text that looks like them.

A template comes with the checkpoint and is not trusted. It is rendered in a sandbox, in a confined process
(`confined_worker.py`) with little memory. The process is killed when it takes too long. The event loop only waits.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import define, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.confined_setup import RendererSetup
from adapters.text.confined_worker import ConfinedWorker, WorkFailed, WorkTimedOut
from adapters.text.conversation import iterate_completed
from effects.ids import Tokens

MAX_OWN_CHARS = 1 << 16  # that a template adds to one word; a built-in system prompt takes a few thousand
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "TZ", "SYSTEMROOT")

# A rendered conversation: text, and control tokens that the template itself wrote.
Rendered: TypeAlias = "tuple[str | ControlToken, ...]"
Spliced: TypeAlias = "tuple[str | ControlToken | VerbatimTokens, ...]"


@frozen
class ControlToken:
    """A control token: its text, its id, and whether it removes the white space to its left or right."""

    content: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


@frozen
class VerbatimTokens:
    """Tokens that replace what the template wrote, and their text."""

    tokens: Tokens
    content: str


class TemplateRefused(Exception):
    """The template refuses this conversation and says why. The client must change it."""


class TemplateFailed(Exception):
    """The template took too long, wrote nothing or too much, or failed. It would fail again with this conversation."""


class TemplateTimedOut(TemplateFailed):
    """The template did not end in time although it had processor time left: the machine is too busy."""


@define(eq=False)
class ChatTemplate:
    """One template and the worker that renders it. The worker starts with the first render and after a kill.

    seconds: processor time of one render. max_chars: length of the output. max_bytes: address space of the worker.
    """

    source: str
    controls: Sequence[ControlToken]
    variables: Mapping[str, str] = field(factory=dict)  # bos_token, eos_token ...
    seconds: int = 2
    max_chars: int = 1 << 25
    max_bytes: int = 1 << 30
    _confined: ConfinedWorker = field(init=False)
    _nonce: str = field(factory=lambda: str(secrets.randbits(128)), init=False)

    def __attrs_post_init__(self) -> None:
        self._confined = ConfinedWorker(self._setup, self.seconds, self.max_bytes, 8 * self.max_chars)

    @property
    def wants_argument_text(self) -> bool:
        """Does the template take the arguments of calls as text? Otherwise it gets the parsed object."""
        return bool(re.search(r"arguments\s+is\s+(not\s+)?string", self.source))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **variables: Any
    ) -> Rendered:
        """Render a conversation. If the template fails, render it again with what was left out in the variables.

        generate: end with the opening of the assistant's answer.
        variables: `tools` and whatever else the template reads.

        Raises TemplateRefused or TemplateFailed.
        """
        asked = {"messages": list(messages), "add_generation_prompt": generate, **variables}
        try:
            return await self._render_once(asked)
        except TemplateTimedOut:
            raise
        except (TemplateFailed, TemplateRefused) as failure:
            said: TemplateFailed | TemplateRefused = failure
        for completed in iterate_completed(asked):
            try:
                return await self._render_once(completed)
            except (TemplateFailed, TemplateRefused) as failure:
                said = failure
        raise said

    async def _render_once(self, asked: Mapping[str, Any]) -> Rendered:
        try:
            reply = await self._confined.ask(asked)
        except WorkTimedOut as failure:
            raise TemplateTimedOut(f"the chat template {failure}") from None
        except WorkFailed as failure:
            raise TemplateFailed(f"the chat template {failure}") from None
        if reply.error == "refused":
            raise TemplateRefused(reply.text)
        if reply.error:
            raise TemplateFailed(reply.text)
        if not reply.text:
            raise TemplateFailed("the chat template wrote nothing")
        return self._split(reply.text)

    async def check(self) -> Rendered:
        """Return a small conversation, rendered. Raises CheckpointError if the template cannot even do that."""
        try:
            rendered = await self.render([{"role": "user", "content": "Hello"}])
        except (TemplateFailed, TemplateRefused) as error:
            raise CheckpointError(f"the chat template does not work: {error}") from error
        if (length := len(join_rendered(rendered))) > MAX_OWN_CHARS:
            raise CheckpointError(f"the chat template adds {length} characters to a word; accepted: {MAX_OWN_CHARS}")
        return rendered

    async def aclose(self) -> None:
        """End the worker. The next render starts another."""
        await self._confined.aclose()

    def _setup(self) -> RendererSetup:
        return {
            "template": self.source,
            "controls": [control.content for control in self.controls],
            "variables": dict(self.variables),
            "nonce": self._nonce,
            "max_chars": self.max_chars,
        }

    def _split(self, text: str) -> Rendered:
        """Split the output at its marks, which become control tokens."""
        pieces = re.split(f"\ufdd0{self._nonce}\ufdd2([0-9]+)\ufdd1", text)
        rendered = [self.controls[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces)]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateFailed("the chat template wrote a lone surrogate") from None
        return tuple(piece for piece in rendered if piece)


def join_rendered(rendered: Spliced) -> str:
    """Return the whole prompt as one text, with control tokens written out."""
    return "".join(piece if isinstance(piece, str) else piece.content for piece in rendered)
