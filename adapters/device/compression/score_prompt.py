"""Compresses prompts: a small model scores the tokens in pieces, other work runs in between, and some are kept."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Protocol

from attrs import define, field

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.compression.select_tokens import SelectedTokens, TokenMarks, select
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.out_of_memory import is_out_of_memory, out_of_memory_failure
from adapters.models.decoder.scorer import TAIL
from effects.all import EffectRequest, Launch, Outcome
from effects.compression import WHOLE, PromptPart, select_tokens
from effects.ids import DeviceFailed, RequestId, Span, Tokens
from effects.ports import DeliverOutcomes, LaunchFailed
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

log = logging.getLogger("rekindle.device")

CLOSING = 8  # the last tokens of a frozen message, which close it and open the next one; they are always kept


class MovableWeights(Protocol):
    """Weights that can be moved, as `OffloadableWeights` are. loaded: None while they cannot be used."""

    @property
    def loaded(self) -> object | None: ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...

    def load_back(self) -> int: ...

    def offload(self) -> object: ...

    def release(self) -> object: ...


class PromptScoring(Protocol):
    """The scoring of one prompt, in turns; see `adapters.models.decoder.scorer.Scoring`."""

    @property
    def complete(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def advance(self) -> None:
        """Take one more turn. Raises torch.OutOfMemoryError; and OSError if another process scores it and cannot."""
        ...

    def scores(self) -> list[float]: ...

    def drop(self) -> None: ...


class PromptScorer(Protocol):
    """A model that scores prompts: a `Scorer` of this process, or one in another process."""

    @property
    def weights(self) -> MovableWeights: ...

    @property
    def chunk(self) -> int: ...

    def begin(self, tokens: Tokens) -> PromptScoring: ...


@define(eq=False)
class CompressionWork:
    """The compression of one prompt, or of its aged messages one after the other.

    The request holds a slot meanwhile, so there are at most as many of them as slots.
    """

    scorer: PromptScorer
    asked: CompressPrompt
    scoring: PromptScoring | None = None  # of the prompt, or of message number `message`
    message: int = 0
    kept: list[SelectedTokens | None] = field(factory=list)  # of the prompt, or of the messages before number `message`
    ns: int = 0

    @property
    def texts(self) -> tuple[Tokens, ...]:
        """The texts that are scored, each by itself."""
        tokens = self.asked.tokens
        return tuple(tokens[part.start : part.stop] for part in self.asked.parts) if self.asked.apart else (tokens,)

    @property
    def complete(self) -> bool:
        """Have all texts been scored?"""
        return self.message == len(self.texts)

    def advance(self, marks: TokenMarks) -> None:
        """Take one more turn of the text that is being scored. Raises what `PromptScoring.advance` raises."""
        text = self.texts[self.message]
        if self.scoring is None:
            self.scoring = self.scorer.begin(text)
        self.scoring.advance()
        if self.scoring.complete:
            self.kept.append(self._select(text, self.scoring.scores(), marks))
            self.scoring = None
            self.message += 1

    def _select(self, text: Tokens, scores: list[float], marks: TokenMarks) -> SelectedTokens | None:
        asked = self.asked
        if not asked.apart:
            return select(text, scores, asked.parts, marks, keep=asked.keep, most=asked.most)
        closing = len(text) - CLOSING
        whole = PromptPart("", 0, closing), PromptPart("", closing, len(text), protected=True)
        keep = max(1, len(text) * asked.parts[self.message].keep // WHOLE)
        return select(text, scores, whole, marks, keep=keep, most=len(text))

    def build_outcome(self) -> PromptCompressed:
        """Return the outcome of a complete compression."""
        if not self.asked.apart:
            return build_prompt_compressed(self.asked.tokens, self.kept[0], self.ns)
        spans = list[Span]()
        forced = list[Span]()
        for part, kept in zip(self.asked.parts, self.kept, strict=True):
            whole = (part.start, part.stop)
            spans += (whole,) if kept is None else shift_spans(kept.spans, part.start)
            forced += (whole,) if kept is None else shift_spans(kept.forced, part.start)
        return PromptCompressed((), tuple(spans), tuple(forced), self.ns)


@define(eq=False)
class Compressor:
    """Carries out the effects on the scoring model, on the lane of its device."""

    scorer: PromptScorer
    marks: TokenMarks
    _works: dict[RequestId, CompressionWork] = field(init=False, factory=dict)

    def compress(self, request: RequestId, effect: CompressPrompt) -> PromptScored | PromptCompressed | DeviceFailed:
        """Score one more piece, which takes about as long as one chunk of the target. Raises torch.OutOfMemoryError."""
        started = time.perf_counter_ns()
        if self.scorer.weights.loaded is None:
            return DeviceFailed("broken", "the scorer is not loaded")
        work = self._works.pop(request, None)
        if not effect.start:
            if len(effect.tokens) < TAIL:
                return PromptCompressed(effect.tokens, ((0, len(effect.tokens)),))
            work = CompressionWork(self.scorer, effect)
        if work is None:
            return DeviceFailed("broken", f"nothing of request {request} was scored before token {effect.start}")
        try:
            work.advance(self.marks)
        except OSError as error:
            return DeviceFailed("io", str(error))
        work.ns += time.perf_counter_ns() - started
        if work.complete:
            return work.build_outcome()
        self._works[request] = work
        return PromptScored(effect.start + self.scorer.chunk)

    def forget(self, request: RequestId) -> None:
        """Drop what was scored for a request, which has left or begins again."""
        work = self._works.pop(request, None)
        if work is not None and work.scoring is not None:
            work.scoring.drop()

    def load(self, _: RequestId, __: LoadModel) -> ModelLoaded | DeviceFailed:
        """Bring the weights in. Raises torch.OutOfMemoryError. A failure leaves the model where it was."""
        started = time.perf_counter_ns()
        try:
            moved = self.scorer.weights.load_back()
        except (CheckpointError, OSError) as error:
            return DeviceFailed("io", str(error))
        return ModelLoaded(moved, time.perf_counter_ns() - started, "scorer")

    def unload(self, _: RequestId, effect: UnloadModel) -> ModelUnloaded:
        """Send the weights to host memory, or drop them."""
        started_ns = time.perf_counter_ns()
        weights_bytes = self.scorer.weights.weights_bytes
        if effect.keep:
            self.scorer.weights.offload()
        else:
            self.scorer.weights.release()
        return ModelUnloaded(weights_bytes, time.perf_counter_ns() - started_ns)

    @property
    def weights_bytes(self) -> tuple[int, int]:
        """The bytes of its weights on its device, and in host memory."""
        return self.scorer.weights.weights_bytes, self.scorer.weights.host_bytes

    @property
    def buffers(self) -> int:
        """The bytes that scorings hold. Read by other threads as well."""
        scorings = [work.scoring for work in tuple(self._works.values())]
        return sum(scoring.nbytes for scoring in scorings if scoring is not None)


@define(eq=False)
class PromptScorerLane:
    """A scoring model on a device of its own: its work runs on another thread, parallel to the target's."""

    compressor: Compressor
    lane: DeviceLane
    _in_flight: set[RequestId] = field(init=False, factory=set)
    _abandoned: set[RequestId] = field(init=False, factory=set)

    def submit(self, launch: Launch, done: DeliverOutcomes) -> None:
        """Carry out a launch of one request, as `DeviceExecutor.submit` does."""
        [effect_request] = launch.effect_requests
        self._in_flight.add(effect_request.request)

        def on_done(outcome: Outcome | None, error: BaseException | None) -> None:
            self._in_flight.discard(effect_request.request)
            self._abandoned.discard(effect_request.request)
            if outcome is not None:
                done(((effect_request.request, outcome),))
            else:
                done(LaunchFailed((effect_request.request,), error or LookupError("no outcome")))

        self.lane.submit(partial(self._carry_out, effect_request), on_done)

    def abandon(self, request: RequestId) -> None:
        """Give the request up, and drop what was scored for it."""
        if request in self._in_flight:
            self._abandoned.add(request)
        self.lane.post(partial(self.compressor.forget, request), log_drop_failure)

    def close(self) -> bool:
        """Release the weights and end the lane. Return False if it was still busy."""
        if not self.lane.is_closed:
            self.lane.post(self.compressor.scorer.weights.release, log_drop_failure)
        return self.lane.close()

    def _carry_out(self, effect_request: EffectRequest) -> Outcome:
        if effect_request.request in self._abandoned:
            return DeviceFailed("abandoned", f"request {effect_request.request} was abandoned before this started")
        try:
            return self._dispatch(effect_request)
        except Exception as error:
            if is_out_of_memory(error):
                return out_of_memory_failure(error)
            raise

    def _dispatch(self, effect_request: EffectRequest) -> Outcome:
        match effect_request.effect:
            case CompressPrompt():
                return self.compressor.compress(effect_request.request, effect_request.effect)
            case LoadModel():
                return self.compressor.load(effect_request.request, effect_request.effect)
            case UnloadModel():
                return self.compressor.unload(effect_request.request, effect_request.effect)
            case other:
                raise LookupError(f"{type(other).__name__} is no effect of a prompt scorer")


def log_drop_failure(error: BaseException) -> None:
    log.error("the memory of a prompt scorer could not be freed", exc_info=error)


def build_prompt_compressed(prompt: Tokens, kept: SelectedTokens | None, ns: int) -> PromptCompressed:
    """Return the outcome for a prompt. kept: None if leaving tokens out is not possible, or would not help."""
    if kept is None or kept.tokens >= len(prompt):
        return PromptCompressed(prompt, ((0, len(prompt)),), ns=ns)
    return PromptCompressed(select_tokens(prompt, kept.spans), kept.spans, kept.forced, ns)


def shift_spans(spans: tuple[Span, ...], by: int) -> tuple[Span, ...]:
    """Return the spans moved by this many tokens."""
    return tuple((start + by, stop + by) for start, stop in spans)


def build_token_marks(pieces: list[bytes], controls: frozenset[int]) -> TokenMarks:
    """Return the marks of a vocabulary. pieces: the bytes of each token, by id."""
    lines = bytes(piece.rstrip(b" \t\r").endswith(b"\n") for piece in pieces)
    sentences = bytes(piece.rstrip().endswith((b".", b"!", b"?", b";", "。".encode())) for piece in pieces)
    return TokenMarks(lines, sentences, controls)
