"""Everything about text that a server needs from a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from adapters.checkpoint.errors import CheckpointError
from adapters.checkpoint.text_files import TextFiles
from adapters.text.boundaries import Openings, find_openings
from adapters.text.template import ChatTemplate, Rendered, TemplateFailed, TemplateRefused, text_of
from adapters.text.tokenizer import Gone, Tokenizer
from effects.ids import Tokens
from effects.job import Sampling


@define(eq=False)
class Text:
    """A tokenizer, a chat template if there is one, and how the checkpoint wants to be sampled."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    sampling: Sampling = field(factory=Sampling)
    openings: Openings = field(factory=Openings)  # of messages, as the template writes them; known from `check` on

    @staticmethod
    def load(folder: Path) -> Text:
        """Raises CheckpointError."""
        files = TextFiles.read(folder)
        tokenizer, template = Tokenizer.of(files), None
        if files.template is not None:
            template = ChatTemplate(files.template, tuple(tokenizer.controls.values()), tokenizer.variables)
        return Text(tokenizer, template, default_sampling(files.generation))

    async def check(self) -> tuple[str, ...]:
        """Try the template. Returns warnings; raises CheckpointError if it does not work at all.

        Warns where a template puts control tokens together from parts, which then are served as plain text. From now
        on it is known how the template opens messages.
        """
        if self.template is None:
            return ("the checkpoint has no chat template: only completions are served",)
        await self.template.check()
        self.openings = await find_openings(self.template, self.tokenizer)
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
        try:
            rendered = await self.template.render([*messages, messages[0]])
        except (TemplateRefused, TemplateFailed) as error:
            return (f"the chat template does not render a conversation of several turns: {error}",)
        whole = (await self.tokenizer.encode([text_of(rendered)], controls=True))[0]
        if whole != await self.tokenizer.encode_rendered(rendered):
            return ("the chat template puts control tokens together from parts, which are served as plain text",)
        return ()

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None, gone: Gone | None = None, **variables: Any
    ) -> Tokens:
        """A conversation's prompt, ready for the assistant's answer. The checkpoint must have a template.

        most, gone: as `Tokenizer.encode` has them.
        """
        return await self.tokenizer.encode_rendered(await self.render(messages, **variables), most, gone)

    async def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendered:
        assert self.template is not None
        return await self.template.render(messages, **variables)

    async def aclose(self) -> None:
        if self.template is not None:
            await self.template.aclose()


def default_sampling(settings: Mapping[str, Any]) -> Sampling:
    """generation_config.json, then OpenAI's: temperature 1, top-p 1. With `do_sample: false` in it: greedy.

    Raises CheckpointError for a value out of range.
    """
    ranges = {
        "temperature": (0, 2),
        "top_p": (1e-6, 1),
        "min_p": (0, 1),
        "top_k": (-1, 1 << 31),
        "repetition_penalty": (1e-3, 10),
    }
    chosen: dict[str, Any] = {"temperature": 1.0}
    for name, (low, high) in ranges.items():
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise CheckpointError(f"generation_config.json: {name} is {value!r}, not a number in [{low:g}, {high:g}]")
        chosen[name] = max(0, int(value)) if name == "top_k" else value
    sample = settings.get("do_sample")
    if not isinstance(sample, bool | None):
        raise CheckpointError(f"generation_config.json: do_sample is {sample!r}, not true or false")
    if sample is False:
        chosen["temperature"] = 0.0
    return Sampling(**chosen)
