"""Chat templates: from messages to text in which the template's own control tokens are known from typed ones.

A template comes with the checkpoint and is not trusted: it is rendered in a sandbox, in a process of its own
(`worker.py`) with little memory, which is killed when it takes too long. The event loop only waits.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import define, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.confined_worker import Confined, WorkFailed, WorkLate
from effects.ids import Tokens

MAX_OWN_CHARS = 1 << 16  # in a prompt that says one word: a system prompt of its own takes a few thousand
INHERITED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "TZ", "SYSTEMROOT")

# A rendered conversation: text, and control tokens that the template itself wrote.
Rendered: TypeAlias = "tuple[str | Control, ...]"
Spliced: TypeAlias = "tuple[str | Control | Verbatim, ...]"


@frozen
class Control:
    """A control token: how it is written, its id, and whether it swallows white space beside it."""

    content: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


@frozen
class Verbatim:
    """Tokens in the place of what the template wrote of them, and how they are written."""

    tokens: Tokens
    content: str


class TemplateRefused(Exception):
    """The template says why it cannot render this conversation: the client's to mend."""


class TemplateFailed(Exception):
    """The template took too long, wrote nothing or too much, or broke: it would do so again with this conversation."""


class TemplateLate(TemplateFailed):
    """The template did not end, and had not used up its processor time: the machine is too busy."""


@define(eq=False)
class ChatTemplate:
    """One template and the worker that renders it. The worker starts with the first render and after a kill.

    seconds: of processor time that a render may take.  max_chars: length of what it may write.
    max_bytes: address space of the worker.
    """

    source: str
    controls: Sequence[Control]
    variables: Mapping[str, str] = field(factory=dict)  # bos_token, eos_token ...
    seconds: int = 2
    max_chars: int = 1 << 25
    max_bytes: int = 1 << 30
    _confined: Confined = field(init=False)
    _nonce: str = field(factory=lambda: str(secrets.randbits(128)), init=False)

    def __attrs_post_init__(self) -> None:
        self._confined = Confined(self._setup, self.seconds, self.max_bytes, 8 * self.max_chars)

    @property
    def wants_argument_text(self) -> bool:
        """Does it handle tool-call arguments as the text they were? Otherwise it is given the parsed object."""
        return bool(re.search(r"arguments\s+is\s+string", self.source))

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True, **variables: Any
    ) -> Rendered:
        """Render a conversation.

        generate: end with the opening of the assistant's answer.
        variables: `tools` and whatever else the template reads.

        Raises TemplateRefused or TemplateFailed.
        """
        asked = {"messages": list(messages), "add_generation_prompt": generate, **variables}
        try:
            reply = await self._confined.ask(asked)
        except WorkLate as failure:
            raise TemplateLate(f"the chat template {failure}") from None
        except WorkFailed as failure:
            raise TemplateFailed(f"the chat template {failure}") from None
        if reply.get("error") == "refused":
            raise TemplateRefused(reply["message"])
        if "error" in reply:
            raise TemplateFailed(reply["message"])
        if not reply["ok"]:
            raise TemplateFailed("the chat template wrote nothing")
        return self._split(reply["ok"])

    async def check(self) -> Rendered:
        """Return a small conversation, rendered. Raises CheckpointError if the template cannot even do that."""
        try:
            rendered = await self.render([{"role": "user", "content": "Hello"}])
        except (TemplateFailed, TemplateRefused) as error:
            raise CheckpointError(f"the chat template does not work: {error}") from error
        if (length := len(text_of(rendered))) > MAX_OWN_CHARS:
            raise CheckpointError(f"the chat template adds {length} characters to a word; accepted: {MAX_OWN_CHARS}")
        return rendered

    async def aclose(self) -> None:
        """End the worker. The next render starts another."""
        await self._confined.aclose()

    def _setup(self) -> Mapping[str, Any]:
        return {
            "template": self.source,
            "controls": [control.content for control in self.controls],
            "variables": dict(self.variables),
            "nonce": self._nonce,
            "max_chars": self.max_chars,
        }

    def _split(self, text: str) -> Rendered:
        """Marks become control tokens."""
        pieces = re.split(f"\ufdd0{self._nonce}\ufdd2([0-9]+)\ufdd1", text)
        rendered = [self.controls[int(piece)] if place % 2 else piece for place, piece in enumerate(pieces)]
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TemplateFailed("the chat template wrote a lone surrogate") from None
        return tuple(piece for piece in rendered if piece)


def text_of(rendered: Spliced) -> str:
    """The whole prompt as one string, control tokens written out."""
    return "".join(piece if isinstance(piece, str) else piece.content for piece in rendered)
