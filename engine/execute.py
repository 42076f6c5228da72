"""Replay on the real model: the recorded effects are carried out again, in order, and the tokens compared.

No draft is needed, whatever the trace was recorded with: what the target agreed to then is proposed to it again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field
from cyclopts import CycloptsError
from torch import Tensor

from adapters.device.drafting import Wish
from adapters.device.executor import DeviceExecutor
from adapters.device.slots import SlotState
from adapters.device.tree import Tree, chain
from adapters.models.shard import Kept, Step
from effects.all import Ask, Launch, Outcome
from effects.ids import DeviceFailed, RequestId, Tokens
from effects.prefill import OpenSlot, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.round import RoundDone, RunRound
from engine.options import Options, checked
from engine.refusal import Refusal
from engine.replay import Diverged, Replay, show
from engine.runner import Envelope
from engine.target import load_target
from engine.trace import Header, Record, read
from states.life import Cancelled, Submitted
from states.world import Out

CARRIED_OUT = (RunPrefill, RunRound)
MOST = 63  # tokens that are proposed in a row


@define(eq=False)
class Remembered:
    """Proposes what the target picked when the trace was recorded. Every request's rounds, with their lines."""

    rounds: Mapping[RequestId, deque[tuple[int, Tokens]]]
    vocab: int
    line: int = 0  # of what is carried out

    @classmethod
    def of(cls, records: Iterable[tuple[int, Record]], vocab: int) -> Remembered:
        rounds: dict[RequestId, deque[tuple[int, Tokens]]] = defaultdict(deque)
        for number, record in records:
            if isinstance(record, Envelope) and isinstance(record.event, RoundDone | DeviceFailed):
                tokens = record.event.tokens if isinstance(record.event, RoundDone) else ()
                rounds[record.request].append((number, tokens))
        return cls(rounds, vocab)

    def propose(self, wishes: Sequence[Wish]) -> list[Tree]:
        return [chain((wish.state.tokens[-1], *self.coming(wish))) for wish in wishes]

    def coming(self, wish: Wish) -> Tokens:
        """All but the last of the tokens that the next outcome brought; a trace is hostile input."""
        later = self.rounds.get(wish.state.request, deque())
        while later and later[0][0] <= self.line:
            later.popleft()
        tokens = later[0][1][:-1] if later else ()
        known = takewhile(lambda token: 0 <= token < self.vocab, tokens)
        return tuple(islice(known, min(wish.most, wish.depth, MOST)))

    def follow(
        self, step: Step, captures: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        """It knows what comes."""

    def catch_up(self, slot: int) -> None:
        """It knows what comes."""

    def opened(self, source: int, target: int, state: SlotState) -> None:
        """It knows what comes."""


@define
class Execution:
    """What the device answered to the asks so far, until the recorded outcome comes by."""

    executor: DeviceExecutor
    chunk: int
    answers: dict[RequestId, Outcome] = field(factory=dict[RequestId, Outcome])
    restores: dict[RequestId, RestoreBlocks] = field(factory=dict[RequestId, RestoreBlocks])
    tokens: int = 0

    async def carry_out(self, out: Out) -> None:
        match out:
            case Launch(asks) if isinstance(asks[0].effect, CARRIED_OUT):
                outcomes = await self.executor.perform(out)
                self.answers |= {ask.request: outcome for ask, outcome in zip(asks, outcomes, strict=True)}
            case Ask(request, OpenSlot() as opening):
                self.executor.open(request, opening)
            case Ask(request, RestoreBlocks() as restore):
                self.restores[request] = restore
            case _:
                pass

    async def compare(self, number: int, envelope: Envelope) -> None:
        match envelope.event:
            case RoundDone() as recorded:
                actual = self.answers.pop(envelope.request, None)
                if not isinstance(actual, RoundDone) or (actual.tokens, actual.logprobs) != (
                    recorded.tokens,
                    recorded.logprobs,
                ):
                    raise Diverged(f"line {number}: {show(envelope)}\n  executed: {actual}")
                self.tokens += len(recorded.tokens)
            case BlocksRestored(start, stop):
                await self.recompute(envelope.request, start, stop)
            case Submitted() | Cancelled():
                pass  # what is on the lane for it answers yet
            case _:
                self.answers.pop(envelope.request, None)

    async def recompute(self, request: RequestId, start: int, stop: int) -> None:
        """A recorded restore whose block may be gone is carried out as prefill: the same rows, bit for bit."""
        slot = self.restores.pop(request).slot
        for at in range(start, stop, self.chunk):
            chunk = RunPrefill(slot, at, min(at + self.chunk, stop))
            await self.executor.perform(Launch((Ask(request, chunk),)))


async def execute(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    """The replay, up to and including event `until`, and how many tokens were compared.

    Raises BadTrace, Diverged or Refusal.
    """
    header, records = read(path)
    if header.redacted:
        raise Refusal(f"{path} is redacted: it replays, but its tokens are gone and cannot be executed")
    target = await load_target(options_of(header, model))
    try:
        if target.identity != header.identity:
            raise Refusal(
                f"{path} was recorded with model and numerics {header.identity}, these are {target.identity}: "
                "the tokens are only promised to be equal within one identity"
            )
        run, execution = Replay.of(header), Execution(target.executor, header.settings.chunk)
        remembered = Remembered.of(read(path)[1], target.checkpoint.config.vocab_size)
        target.executor.proposed_to(remembered)
        for number, record in records:
            remembered.line = number
            if until is not None and isinstance(record, Envelope) and record.seq > until:
                return run, execution.tokens
            outs = run.feed(number, record)
            if isinstance(record, Envelope):
                await execution.compare(number, record)
                for out in outs:
                    await execution.carry_out(out)
        run.finish()
        return run, execution.tokens
    finally:
        await target.close()


def options_of(header: Header, model: str | None) -> Options:
    """What the trace was served with, as far as it decides the numbers. Raises Refusal: traces are hostile input."""
    wanted: dict[str, Any] = {
        name: header.config[name]
        for name in ("model", "device", "dtype", "max_ctx", "numerics", "slots", "chunk", "threads")
        if name in header.config
    }
    if model is not None:
        wanted["model"] = model
    wanted |= {"disk_prefix_cache": "off", "host_cache_budget": 0, "draft": "none"}
    try:
        return checked(wanted)
    except CycloptsError as error:
        raise Refusal(f"the trace's header: {error}") from error


def execute_file(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    return anyio.run(execute, path, model, until)
