"""Write answers as OpenAI's chat completions and (legacy) completions have them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from attrs import define, field, frozen

from adapters.http.answer import usage as figures
from adapters.http.answer.answer_shape import COMMENT, DONE, encode_event
from adapters.http.answer.job_stream import AnswerDelta, FinishedChoice, PromptProgress
from adapters.http.edge_options import EdgeOptions
from adapters.http.request.controls import Controls
from adapters.http.request.parsed_request import ParsedRequest
from adapters.http.wire.error_format import make_openai_error
from adapters.http.wire.errors import ApiError
from adapters.text.tokenizer import Tokenizer
from effects.decode import Logprob

D = TypeVar("D")


@define(eq=False)
class OpenAiShape(ABC, Generic[D]):
    """Writes what both APIs have in common. Subclasses write a choice, in a chunk and in a whole answer."""

    id: str
    request: ParsedRequest[D]
    options: EdgeOptions
    tokenizer: Tokenizer
    created: int = field(factory=lambda: int(time.time()), init=False)
    _chunk_head: Mapping[str, str | int] | None = field(default=None, init=False)  # the same for all chunks
    chunk_kind = ""
    whole_kind = ""

    @property
    def controls(self) -> Controls:
        return self.request.controls

    def make_head(self, kind: str) -> dict[str, str | int]:
        """Return the fields that every OpenAI object has."""
        head: dict[str, str | int] = {"id": self.id, "object": kind, "created": self.created}
        head |= {"model": self.controls.model, "system_fingerprint": self.options.fingerprint}
        return {**head, "service_tier": "default"} if self.controls.names_tier else head

    def encode_chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._chunk_head is None:
            self._chunk_head = self.make_head(self.chunk_kind)
        usage = {"usage": None} if self.request.controls.include_usage else {}
        return encode_event({**self._chunk_head, "choices": choices, **usage, **more})

    def stream_progress(self, progress: PromptProgress, elapsed_ms: float) -> Iterable[bytes]:
        more = figures.make_progress_fields(progress, elapsed_ms, self.controls)
        yield self.encode_chunk([self.make_empty_choice(progress.index)], **more)

    def stream_heartbeat(self) -> Iterable[bytes]:
        yield COMMENT
        yield self.encode_chunk([self.make_empty_choice(0)])

    def stream_choice_end(self, ended: FinishedChoice) -> Iterable[bytes]:
        choice = {**self.make_empty_choice(ended.index), "finish_reason": self.find_finish_reason(ended)}
        rekindle = figures.describe_choice(ended, self.options)
        yield self.encode_chunk([choice], timings=figures.make_timings(ended), rekindle=rekindle)

    def stream_closing(self, ended: Sequence[FinishedChoice]) -> Iterable[bytes]:
        if self.controls.include_usage:
            rekindle = figures.describe_choices(ended, self.options)
            yield self.encode_chunk(
                [], usage=figures.count_usage(ended), timings=figures.make_timings(ended[0]), rekindle=rekindle
            )
        yield DONE

    def stream_error(self, error: ApiError) -> Iterable[bytes]:
        yield encode_event(make_openai_error(error))

    def build_answer(self, said: Mapping[int, AnswerDelta], ended: Sequence[FinishedChoice]) -> dict[str, Any]:
        return {
            **self.make_head(self.whole_kind),
            "choices": [
                self.make_choice(said.get(choice.index, AnswerDelta(choice.index, ())), choice) for choice in ended
            ],
            "usage": figures.count_usage(ended),
            "timings": figures.make_timings(ended[0]),
            "rekindle": figures.describe_choices(ended, self.options),
        }

    def find_finish_reason(self, ended: FinishedChoice) -> str:
        return finish_reason_of(ended)

    @abstractmethod
    def stream_opening(self) -> Iterable[bytes]: ...

    @abstractmethod
    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]: ...

    @abstractmethod
    def make_empty_choice(self, index: int) -> dict[str, Any]:
        """Return a chunk's choice without text."""

    @abstractmethod
    def make_choice(self, said: AnswerDelta, ended: FinishedChoice) -> dict[str, Any]:
        """Return the choice of a whole answer."""


def finish_reason_of(ended: FinishedChoice) -> str:
    """Return OpenAI's finish reason.

    An answer that was cut off within a call does not end with "tool_calls", because no client should make that call.
    """
    return "tool_calls" if ended.called_functions and ended.outcome.finish == "stop" else ended.outcome.finish


def mean_logprob(said: AnswerDelta | None) -> float:
    """Return the mean logprob of the tokens of an answer; 0 where it has none."""
    picks = () if said is None else said.picks
    return sum(pick.logprob[0] for pick in picks) / len(picks) if picks else 0.0


def make_token_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """Return a token with its logprob."""
    raw = tokenizer.token_bytes(token)
    return {"id": token, "token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


@frozen
class BestOf:
    """The number of answers to each prompt that are returned of those generated, and whether with their logprobs."""

    count: int
    shows_logprobs: bool


@define(eq=False)
class CompletionShape(OpenAiShape["BestOf | None"]):
    """Writes legacy completions.

    offsets: the position of each choice's next logprob in its text. held_deltas: the text so far of each choice, in a
    stream that begins with the prompt's logprobs. These are known when the answer is complete, so all of it is sent
    then.
    """

    chunk_kind = "text_completion"
    whole_kind = "text_completion"
    offsets: dict[int, int] = field(factory=dict)
    held_deltas: dict[int, AnswerDelta] = field(factory=dict)

    @property
    def sends_text_at_end(self) -> bool:
        return self.controls.echo and self.controls.sampling.logprobs >= 0

    def stream_opening(self) -> Iterable[bytes]:
        if self.controls.echo and not self.sends_text_at_end:
            for index in range(len(self.request.prompts) * self.controls.choices):
                yield self.encode_chunk([{**self.make_empty_choice(index), "text": self.echo_prompt(index)}])

    def stream_delta(self, said: AnswerDelta) -> Iterable[bytes]:
        if self.sends_text_at_end:
            before = self.held_deltas.get(said.index, AnswerDelta(said.index, ()))
            self.held_deltas[said.index] = AnswerDelta(
                said.index, before.pieces + said.pieces, before.picks + said.picks
            )
            return
        choice = {**self.make_empty_choice(said.index), "text": said.text, "logprobs": self.make_logprobs(said)}
        yield self.encode_chunk([choice], **figures.make_pace_fields(said, self.controls))

    def stream_choice_end(self, ended: FinishedChoice) -> Iterable[bytes]:
        if self.sends_text_at_end:
            said = self.held_deltas.pop(ended.index, AnswerDelta(ended.index, ()))
            yield self.encode_chunk([{**self.make_choice(said, ended), "finish_reason": None}])
        yield from super().stream_choice_end(ended)

    def build_answer(self, said: Mapping[int, AnswerDelta], ended: Sequence[FinishedChoice]) -> dict[str, Any]:
        answer = super().build_answer(said, ended)
        best = self.request.details
        if best is not None:
            answer["choices"] = [*self.choose_best(answer["choices"], said, best)]
        return answer

    def choose_best(
        self, choices: Sequence[dict[str, Any]], said: Mapping[int, AnswerDelta], best: BestOf
    ) -> Iterator[dict[str, Any]]:
        """Yield the best answers to each prompt: those with the highest logprob per token, the best one first."""
        per_prompt = self.controls.choices
        hidden = {} if best.shows_logprobs else {"logprobs": None}
        index = 0
        for first in range(0, len(choices), per_prompt):
            ranked = sorted(
                choices[first : first + per_prompt], key=lambda choice: -mean_logprob(said.get(choice["index"]))
            )
            for choice in ranked[: best.count]:
                yield {**choice, "index": index, **hidden}
                index += 1

    def make_empty_choice(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def make_choice(self, said: AnswerDelta, ended: FinishedChoice) -> dict[str, Any]:
        text = self.echo_prompt(ended.index) + said.text
        prompt = ended.planned_job.job.prompt
        before: list[tuple[int, Logprob | None]] = []
        if ended.planned_job.job.prompt_logprobs >= 0:
            before = list(zip(prompt, (None, *ended.outcome.report.prompt_logprobs), strict=True))
        choice = {"text": text, "logprobs": self.make_logprobs(said, before), "finish_reason": finish_reason_of(ended)}
        return {"index": ended.index, **choice}

    def echo_prompt(self, index: int) -> str:
        """Return the prompt, if it is part of the answer."""
        prompt = self.request.prompts[index // self.controls.choices]
        return self.tokenizer.decode(prompt) if self.controls.echo else ""

    def make_logprobs(
        self, said: AnswerDelta, before: Sequence[tuple[int, Logprob | None]] = ()
    ) -> dict[str, Any] | None:
        """Return the logprobs of a choice. before: tokens of the prompt; the first one has no logprob."""
        every = [*before, *((pick.token, pick.logprob) for pick in said.picks)]
        if not every:
            return None
        offset = self.offsets.get(said.index, 0)
        offsets = []
        for token, _ in every:
            offsets.append(offset)
            offset += 0 if token in self.tokenizer.special else len(self.spell_token(token))
        self.offsets[said.index] = offset
        return {
            "tokens": [self.spell_token(token) for token, _ in every],
            "token_logprobs": [logprob and logprob[0] for _, logprob in every],
            "top_logprobs": [
                known and {self.spell_token(token): value for token, value in reversed(known[1])} for _, known in every
            ],
            "text_offset": offsets,
        }

    def spell_token(self, token: int) -> str:
        r"""Return a token as text. A token that is not whole characters is written as OpenAI does: `bytes:\xf0\x9f`."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
