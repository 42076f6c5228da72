"""Answers as OpenAI's chat completions and (legacy) completions give them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from adapters.http.answer import usage as figures
from adapters.http.answer.answer_shape import COMMENT, DONE, event
from adapters.http.answer.job_stream import Ended, Progress, Said
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.asked import Asked
from adapters.http.request.controls import Controls
from adapters.http.wire.error_format import openai_error
from adapters.http.wire.errors import ApiError
from adapters.text.tokenizer import Tokenizer
from effects.decode import Logprob


@define(eq=False)
class OpenAiShape(ABC):
    """What both have in common. Subclasses say how a choice looks, in a chunk and in a whole answer."""

    id: str
    asked: Asked
    options: EdgeOptions
    tokenizer: Tokenizer
    created: int = field(factory=lambda: int(time.time()), init=False)
    chunk_kind = ""
    whole_kind = ""

    @property
    def controls(self) -> Controls:
        return self.asked.controls

    def head(self, kind: str) -> dict[str, Any]:
        """What every OpenAI object carries."""
        named = {"id": self.id, "object": kind, "created": self.created, "model": self.controls.model}
        tier = {"service_tier": "default"} if self.controls.tier else {}
        return {**named, "system_fingerprint": "fp_rekindle", **tier}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self.controls.include_usage else {}
        return event({**self.head(self.chunk_kind), "choices": choices, **usage, **more})

    def progress(self, progress: Progress, elapsed_ms: float) -> Iterable[bytes]:
        told = figures.prompt_progress(progress, elapsed_ms)
        yield self.chunk([self.silence(progress.index)], prompt_progress=told)

    def heartbeat(self) -> Iterable[bytes]:
        yield COMMENT
        yield self.chunk([self.silence(0)])

    def ended(self, ended: Ended) -> Iterable[bytes]:
        choice = {**self.silence(ended.index), "finish_reason": self.finish(ended)}
        told = figures.rekindle(ended, self.options)
        yield self.chunk([choice], timings=figures.timings(ended), rekindle=told)

    def closing(self, ended: Sequence[Ended]) -> Iterable[bytes]:
        if self.controls.include_usage:
            told = figures.rekindle_all(ended, self.options)
            yield self.chunk([], usage=figures.usage(ended), timings=figures.timings(ended[0]), rekindle=told)
        yield DONE

    def failed(self, error: ApiError) -> Iterable[bytes]:
        yield event(openai_error(error))

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> dict[str, Any]:
        return {
            **self.head(self.whole_kind),
            "choices": [self.choice(said.get(one.index, Said(one.index, ())), one) for one in ended],
            "usage": figures.usage(ended),
            "timings": figures.timings(ended[0]),
            "rekindle": figures.rekindle_all(ended, self.options),
        }

    def finish(self, ended: Ended) -> str:
        return finish_of(ended)

    @abstractmethod
    def opening(self) -> Iterable[bytes]: ...

    @abstractmethod
    def said(self, said: Said) -> Iterable[bytes]: ...

    @abstractmethod
    def silence(self, index: int) -> dict[str, Any]:
        """A chunk's choice that says nothing."""

    @abstractmethod
    def choice(self, said: Said, ended: Ended) -> dict[str, Any]:
        """A whole answer's choice."""


def finish_of(ended: Ended) -> str:
    """An answer that was cut off in the middle of a call is cut off first of all: nobody should make that call."""
    return "tool_calls" if ended.called and ended.closed.finish == "stop" else ended.closed.finish


def likelihood(said: Said | None) -> float:
    """Return the mean logprob of the tokens of an answer; 0 where it has none."""
    picks = () if said is None else said.picks
    return sum(pick.logprob[0] for pick in picks) / len(picks) if picks else 0.0


def named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """A token with its logprob."""
    raw = tokenizer.token_bytes(token)
    return {"id": token, "token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


@define(eq=False)
class CompletionShape(OpenAiShape):
    """`offsets`: where each choice's next logprob stands in its text.

    waiting: what each choice has said in a stream that begins with the prompt's logprobs. They are known when the
    answer is complete, so it comes as a whole then.
    """

    chunk_kind = "text_completion"
    whole_kind = "text_completion"
    offsets: dict[int, int] = field(factory=dict)
    waiting: dict[int, Said] = field(factory=dict)

    @property
    def waits(self) -> bool:
        return self.controls.echo and self.controls.sampling.logprobs >= 0

    def opening(self) -> Iterable[bytes]:
        if self.controls.echo and not self.waits:
            for index in range(len(self.asked.prompts) * self.controls.choices):
                yield self.chunk([{**self.silence(index), "text": self.echoed(index)}])

    def said(self, said: Said) -> Iterable[bytes]:
        if self.waits:
            before = self.waiting.get(said.index, Said(said.index, ()))
            self.waiting[said.index] = Said(said.index, before.pieces + said.pieces, before.picks + said.picks)
            return
        yield self.chunk([{**self.silence(said.index), "text": said.text, "logprobs": self.logprobs(said)}])

    def ended(self, ended: Ended) -> Iterable[bytes]:
        if self.waits:
            said = self.waiting.pop(ended.index, Said(ended.index, ()))
            yield self.chunk([{**self.choice(said, ended), "finish_reason": None}])
        yield from super().ended(ended)

    def whole(self, said: Mapping[int, Said], ended: Sequence[Ended]) -> dict[str, Any]:
        answer = super().whole(said, ended)
        best = self.asked.echo.get("best")
        if best is not None:
            answer["choices"] = [*self.best(answer["choices"], said, best)]
        return answer

    def best(self, choices: Sequence[dict[str, Any]], said: Mapping[int, Said], count: int) -> Iterator[dict[str, Any]]:
        """Choose so many answers to each prompt: those with the highest logprob per token, the best one first."""
        each, index = self.controls.choices, 0
        for first in range(0, len(choices), each):
            ranked = sorted(choices[first : first + each], key=lambda one: -likelihood(said.get(one["index"])))
            for choice in ranked[:count]:
                hidden = {} if self.asked.echo["logprobs"] else {"logprobs": None}
                yield {**choice, "index": index, **hidden}
                index += 1

    def silence(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def choice(self, said: Said, ended: Ended) -> dict[str, Any]:
        text, prompt = self.echoed(ended.index) + said.text, ended.planned.job.prompt
        before: list[tuple[int, Logprob | None]] = []
        if ended.planned.job.prompt_logprobs >= 0:
            before = list(zip(prompt, (None, *ended.closed.report.prompt_logprobs), strict=True))
        told = {"text": text, "logprobs": self.logprobs(said, before), "finish_reason": finish_of(ended)}
        return {"index": ended.index, **told}

    def echoed(self, index: int) -> str:
        """The prompt, where it is part of the answer."""
        prompt = self.asked.prompts[index // self.controls.choices]
        return self.tokenizer.decode(prompt) if self.controls.echo else ""

    def logprobs(self, said: Said, before: Sequence[tuple[int, Logprob | None]] = ()) -> dict[str, Any] | None:
        """before: tokens of the prompt; nothing is known of the first one's."""
        every = [*before, *((pick.token, pick.logprob) for pick in said.picks)]
        if not every:
            return None
        offset = self.offsets.get(said.index, 0)
        offsets = []
        for token, _ in every:
            offsets.append(offset)
            offset += 0 if token in self.tokenizer.special else len(self.written(token))
        self.offsets[said.index] = offset
        return {
            "tokens": [self.written(token) for token, _ in every],
            "token_logprobs": [told and told[0] for _, told in every],
            "top_logprobs": [
                told and {self.written(token): logprob for token, logprob in reversed(told[1])} for _, told in every
            ],
            "text_offset": offsets,
        }

    def written(self, token: int) -> str:
        """A token as text; one that is not whole characters as OpenAI writes it: `bytes:\\xf0\\x9f`."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
