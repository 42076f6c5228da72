"""A drafter at work on the lane: prompts are scored piece by piece, neighbours going on in between, and shortened."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Protocol

from attrs import define, field

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.compression.select_tokens import Marks, Survivors, select
from adapters.device.lane.lane import DeviceLane
from adapters.device.lane.out_of_memory import out_of_memory, ran_out_of_memory
from adapters.models.decoder.scorer import TAIL
from effects.all import EffectRequest, Launch, Outcome
from effects.compression import WHOLE, PromptPart, select_tokens
from effects.ids import DeviceFailed, RequestId, Span, Tokens
from effects.pflash import CompressPrompt, PromptCompressed, PromptScored
from effects.ports import DeliverOutcomes, LaunchFailed
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

log = logging.getLogger("rekindle.device")

CLOSING = 8  # last tokens of a message that is frozen: what closes it, and opens the next


class Movable(Protocol):
    """Weights that come and go, as `OffloadableWeights` do. loaded: None where they are not to be used."""

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
    """One prompt on its way; see `adapters.models.decoder.scorer.Scoring`."""

    @property
    def complete(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def advance(self) -> None:
        """One more turn. Raises torch.OutOfMemoryError, and OSError where it is scored elsewhere and cannot be."""
        ...

    def scores(self) -> list[float]: ...

    def drop(self) -> None: ...


class PromptScorer(Protocol):
    """What scores prompts: a `Scorer` here, or one in another process."""

    @property
    def weights(self) -> Movable: ...

    @property
    def chunk(self) -> int: ...

    def begin(self, tokens: Tokens) -> PromptScoring: ...


@define(eq=False)
class Work:
    """A prompt that is being scored, or its aged messages one after the other. Who is in it holds a slot, so there are
    no more of them than slots.
    """

    scorer: PromptScorer
    asked: CompressPrompt
    scoring: PromptScoring | None = None  # of the prompt, or of the message that it has come to
    message: int = 0
    kept: list[Survivors | None] = field(factory=list)  # of the prompt, or of the messages before that one
    ns: int = 0

    @property
    def texts(self) -> tuple[Tokens, ...]:
        """That are scored, each by itself."""
        tokens = self.asked.tokens
        return tuple(tokens[part.start : part.stop] for part in self.asked.parts) if self.asked.apart else (tokens,)

    @property
    def complete(self) -> bool:
        return self.message == len(self.texts)

    def advance(self, marks: Marks) -> None:
        """One more turn of the prompt's, or of the message's. As `PromptScoring.advance`."""
        text = self.texts[self.message]
        if self.scoring is None:
            self.scoring = self.scorer.begin(text)
        self.scoring.advance()
        if self.scoring.complete:
            self.kept.append(self._selected(text, self.scoring.scores(), marks))
            self.scoring, self.message = None, self.message + 1

    def _selected(self, text: Tokens, scores: list[float], marks: Marks) -> Survivors | None:
        asked = self.asked
        if not asked.apart:
            return select(text, scores, asked.parts, marks, keep=asked.keep, most=asked.most)
        closing = len(text) - CLOSING
        whole = PromptPart("", 0, closing), PromptPart("", closing, len(text), protected=True)
        keep = max(1, len(text) * asked.parts[self.message].keep // WHOLE)
        return select(text, scores, whole, marks, keep=keep, most=len(text))

    def told(self) -> PromptCompressed:
        """What comes of it, now that it is complete."""
        if not self.asked.apart:
            return told(self.asked.tokens, self.kept[0], self.ns)
        spans, forced = list[Span](), list[Span]()
        for part, kept in zip(self.asked.parts, self.kept, strict=True):
            whole = (part.start, part.stop)
            spans += (whole,) if kept is None else moved(kept.spans, part.start)
            forced += (whole,) if kept is None else moved(kept.forced, part.start)
        return PromptCompressed((), tuple(spans), tuple(forced), self.ns)


@define(eq=False)
class Compressor:
    """Carries out what is asked of a drafter, on the lane of its device."""

    scorer: PromptScorer
    marks: Marks
    _works: dict[RequestId, Work] = field(init=False, factory=dict)

    def compress(self, request: RequestId, effect: CompressPrompt) -> PromptScored | PromptCompressed | DeviceFailed:
        """As much work as one chunk of the target's is through all layers. Raises torch.OutOfMemoryError."""
        started = time.perf_counter_ns()
        if self.scorer.weights.loaded is None:
            return DeviceFailed("broken", "the drafter is not loaded")
        work = self._works.pop(request, None)
        if not effect.start:
            if len(effect.tokens) < TAIL:
                return PromptCompressed(effect.tokens, ((0, len(effect.tokens)),))
            work = Work(self.scorer, effect)
        if work is None:
            return DeviceFailed("broken", f"nothing of request {request} was scored before token {effect.start}")
        try:
            work.advance(self.marks)
        except OSError as error:
            return DeviceFailed("io", str(error))
        work.ns += time.perf_counter_ns() - started
        if work.complete:
            return work.told()
        self._works[request] = work
        return PromptScored(effect.start + self.scorer.chunk)

    def forget(self, request: RequestId) -> None:
        """It has left, or begins again."""
        work = self._works.pop(request, None)
        if work is not None and work.scoring is not None:
            work.scoring.drop()

    def load(self, _: RequestId, __: LoadModel) -> ModelLoaded | DeviceFailed:
        """Raises torch.OutOfMemoryError; whatever fails leaves the drafter where it was."""
        started = time.perf_counter_ns()
        try:
            moved = self.scorer.weights.load_back()
        except (CheckpointError, OSError) as error:
            return DeviceFailed("io", str(error))
        return ModelLoaded(moved, time.perf_counter_ns() - started, "drafter")

    def unload(self, _: RequestId, effect: UnloadModel) -> ModelUnloaded:
        started, held = time.perf_counter_ns(), self.scorer.weights.weights_bytes
        if effect.keep:
            self.scorer.weights.offload()
        else:
            self.scorer.weights.release()
        return ModelUnloaded(held, time.perf_counter_ns() - started)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of its weights on its device and in host memory."""
        return self.scorer.weights.weights_bytes, self.scorer.weights.host_bytes

    @property
    def buffers(self) -> int:
        scorings = [work.scoring for work in tuple(self._works.values())]  # asked from other threads, too
        return sum(scoring.nbytes for scoring in scorings if scoring is not None)


@define(eq=False)
class DrafterLane:
    """A drafter on a device of its own: what it is asked runs beside the target's work, on another thread."""

    compressor: Compressor
    lane: DeviceLane
    _flying: set[RequestId] = field(init=False, factory=set)
    _abandoned: set[RequestId] = field(init=False, factory=set)

    def submit(self, launch: Launch, done: DeliverOutcomes) -> None:
        """As `DeviceExecutor.submit` has it."""
        [ask] = launch.asks
        self._flying.add(ask.request)

        def landed(outcome: Outcome | None, error: BaseException | None) -> None:
            self._flying.discard(ask.request)
            self._abandoned.discard(ask.request)
            if outcome is not None:
                done(((ask.request, outcome),))
            else:
                done(LaunchFailed((ask.request,), error or LookupError("no outcome")))

        self.lane.submit(partial(self._carry_out, ask), landed)

    def abandon(self, request: RequestId) -> None:
        if request in self._flying:
            self._abandoned.add(request)
        self.lane.post(partial(self.compressor.forget, request), dropped)

    def close(self) -> bool:
        if not self.lane.closed:
            self.lane.post(self.compressor.scorer.weights.release, dropped)
        return self.lane.close()

    def _carry_out(self, ask: EffectRequest) -> Outcome:
        if ask.request in self._abandoned:
            return DeviceFailed("abandoned", f"request {ask.request} was abandoned before this started")
        try:
            return self._done(ask)
        except Exception as error:
            if ran_out_of_memory(error):
                return out_of_memory(error)
            raise

    def _done(self, ask: EffectRequest) -> Outcome:
        match ask.effect:
            case CompressPrompt():
                return self.compressor.compress(ask.request, ask.effect)
            case LoadModel():
                return self.compressor.load(ask.request, ask.effect)
            case UnloadModel():
                return self.compressor.unload(ask.request, ask.effect)
            case other:
                raise LookupError(f"{type(other).__name__} is nothing for a drafter")


def dropped(error: BaseException) -> None:
    log.error("a drafter's work could not be dropped", exc_info=error)


def told(prompt: Tokens, kept: Survivors | None, ns: int) -> PromptCompressed:
    """kept: None where nothing may be left out that would help."""
    if kept is None or kept.tokens >= len(prompt):
        return PromptCompressed(prompt, ((0, len(prompt)),), ns=ns)
    return PromptCompressed(select_tokens(prompt, kept.spans), kept.spans, kept.forced, ns)


def moved(spans: tuple[Span, ...], by: int) -> tuple[Span, ...]:
    return tuple((start + by, stop + by) for start, stop in spans)


def marks_of(pieces: list[bytes], controls: frozenset[int]) -> Marks:
    """pieces: the bytes of each token, by id."""
    lines = bytes(piece.rstrip(b" \t\r").endswith(b"\n") for piece in pieces)
    sentences = bytes(piece.rstrip().endswith((b".", b"!", b"?", b";", "。".encode())) for piece in pieces)
    return Marks(lines, sentences, controls)
