"""A drafter at work on the lane: prompts are scored piece by piece, neighbours going on in between, and shortened."""

from __future__ import annotations

import logging
import time
from functools import partial

from attrs import define, field

from adapters.checkpoint.errors import CheckpointError
from adapters.device.lane import DeviceLane
from adapters.device.memory import out_of_memory, ran_out_of_memory
from adapters.device.selection import Marks, Survivors, select
from adapters.models.scorer import TAIL, Scorer, Scoring
from effects.all import Ask, Launch, Outcome
from effects.compression import PromptPart
from effects.ids import DeviceFailed, RequestId, Tokens
from effects.pflash import CompressPrompt, PromptCompressed, PromptScored
from effects.ports import Settle
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

log = logging.getLogger("rekindle.device")


@define(eq=False)
class Work:
    """A prompt that is being scored. Who is in it holds a slot, so there are no more of them than slots."""

    scoring: Scoring
    keep: int
    most: int
    parts: tuple[PromptPart, ...]
    ns: int = 0


@define(eq=False)
class Compressor:
    """Carries out what is asked of a drafter, on the lane of its device."""

    scorer: Scorer
    marks: Marks
    _works: dict[RequestId, Work] = field(init=False, factory=dict)

    def compress(self, request: RequestId, effect: CompressPrompt) -> PromptScored | PromptCompressed | DeviceFailed:
        """As much work as one chunk is through all layers. Raises torch.OutOfMemoryError."""
        started = time.perf_counter_ns()
        if self.scorer.weights.loaded is None:
            return DeviceFailed("broken", "the drafter is not loaded")
        work = self._works.pop(request, None)
        if not effect.start:
            if len(effect.tokens) < TAIL:
                return PromptCompressed(effect.tokens, ((0, len(effect.tokens)),))
            work = Work(self.scorer.begin(effect.tokens), effect.keep, effect.most, effect.parts)
        if work is None:
            return DeviceFailed("broken", f"nothing of request {request} was scored before token {effect.start}")
        for _ in range(self.scorer.config.num_layers):
            if work.scoring.complete:
                break
            work.scoring.advance()
        if not work.scoring.complete:
            work.ns += time.perf_counter_ns() - started
            self._works[request] = work
            return PromptScored(effect.start + self.scorer.chunk)
        prompt, scores = work.scoring.tokens, work.scoring.scores()
        kept = select(prompt, scores, work.parts, self.marks, keep=work.keep, most=work.most)
        return told(prompt, kept, work.ns + time.perf_counter_ns() - started)

    def forget(self, request: RequestId) -> None:
        """It has left, or begins again."""
        self._works.pop(request, None)

    def load(self, _: RequestId, __: LoadModel) -> ModelLoaded | DeviceFailed:
        """Raises torch.OutOfMemoryError; whatever fails leaves the drafter where it was."""
        started = time.perf_counter_ns()
        try:
            moved = self.scorer.weights.unpark()
        except (CheckpointError, OSError) as error:
            return DeviceFailed("io", str(error))
        return ModelLoaded(moved, time.perf_counter_ns() - started, "drafter")

    def unload(self, _: RequestId, effect: UnloadModel) -> ModelUnloaded:
        started, held = time.perf_counter_ns(), self.scorer.weights.weights_bytes
        if effect.keep:
            self.scorer.weights.park()
        else:
            self.scorer.weights.release()
        return ModelUnloaded(held, time.perf_counter_ns() - started)

    @property
    def held(self) -> tuple[int, int]:
        """Bytes of its weights on its device and in host memory."""
        return self.scorer.weights.weights_bytes, self.scorer.weights.host_bytes

    @property
    def buffers(self) -> int:
        return sum(work.scoring.nbytes for work in tuple(self._works.values()))  # asked from other threads, too


@define(eq=False)
class DrafterLane:
    """A drafter on a device of its own: what it is asked runs beside the target's work, on another thread."""

    compressor: Compressor
    lane: DeviceLane
    _flying: set[RequestId] = field(init=False, factory=set)
    _abandoned: set[RequestId] = field(init=False, factory=set)

    def submit(self, launch: Launch, done: Settle) -> None:
        """As `DeviceExecutor.submit` has it."""
        [ask] = launch.asks
        self._flying.add(ask.request)

        def landed(outcome: Outcome | None, error: BaseException | None) -> None:
            self._flying.discard(ask.request)
            self._abandoned.discard(ask.request)
            done((outcome,) if outcome is not None else error or LookupError("no outcome"))

        self.lane.submit(partial(self._carry_out, ask), landed)

    def abandon(self, request: RequestId) -> None:
        if request in self._flying:
            self._abandoned.add(request)
        self.lane.post(partial(self.compressor.forget, request), dropped)

    def close(self) -> bool:
        if not self.lane.closed:
            self.lane.post(self.compressor.scorer.weights.release, dropped)
        return self.lane.close()

    def _carry_out(self, ask: Ask) -> Outcome:
        if ask.request in self._abandoned:
            return DeviceFailed("abandoned", f"request {ask.request} was abandoned before this started")
        try:
            return self._done(ask)
        except Exception as error:
            if ran_out_of_memory(error):
                return out_of_memory(error)
            raise

    def _done(self, ask: Ask) -> Outcome:
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
    shortened = tuple(token for start, stop in kept.spans for token in prompt[start:stop])
    return PromptCompressed(shortened, kept.spans, kept.forced, ns)


def marks_of(pieces: list[bytes], controls: frozenset[int]) -> Marks:
    """pieces: the bytes of each token, by id."""
    lines = bytes(piece.rstrip(b" \t\r").endswith(b"\n") for piece in pieces)
    sentences = bytes(piece.rstrip().endswith((b".", b"!", b"?", b";", "。".encode())) for piece in pieces)
    return Marks(lines, sentences, controls)
