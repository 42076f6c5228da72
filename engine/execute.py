"""Replay on the real model: the recorded effects are carried out again, in order, and the tokens compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
from attrs import define, field
from cyclopts import CycloptsError

from adapters.device.executor import DeviceExecutor
from effects.all import Ask, Launch, Outcome
from effects.ids import RequestId
from effects.prefill import OpenSlot, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.round import RoundDone, RunRound
from engine.options import Options, checked
from engine.refusal import Refusal
from engine.replay import Diverged, Replay, show
from engine.runner import Envelope
from engine.target import load_target
from engine.trace import Header, read
from states.world import Out

CARRIED_OUT = (RunPrefill, RunRound)


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
        for number, record in records:
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
    wanted |= {"disk_prefix_cache": "off", "host_cache_budget": 0}
    try:
        return checked(wanted)
    except CycloptsError as error:
        raise Refusal(f"the trace's header: {error}") from error


def execute_file(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    return anyio.run(execute, path, model, until)
