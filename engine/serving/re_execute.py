"""Replay on the real model: the recorded effects are carried out again, in order, and the tokens compared.

No draft is needed, whatever the trace was recorded with: what the target agreed to then is proposed to it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import anyio
from attrs import define, evolve, field
from cyclopts import CycloptsError
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposal_tree import Tree, chain
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.shard import Kept
from adapters.models.kernels.step import Step
from adapters.text.grammars.grammar import Grammars
from adapters.text.tokenizer import Tokenizer
from effects.all import EffectRequest, Launch, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId, Span, Tokens
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from engine.core.event_loop import Envelope
from engine.core.replay import Diverged, Replay, show, until_cut
from engine.core.trace import LINE_LIMIT, BadTrace, Header, Line, read_sized
from engine.loading.background_load import load_target
from engine.loading.load_target import Mismatched
from engine.settings.config_file import checked
from engine.settings.options import Options
from engine.settings.progress import progress
from engine.settings.user_error import UserError
from states.events import ForRequest
from states.world import Output

CARRIED_OUT = (RunPrefill, RunDecode)
MOST = 63  # tokens that are proposed in a row
AHEAD = LINE_LIMIT  # characters between a launch and its outcomes: room for the longest prompt to come in meanwhile


@define
class Ahead:
    """A trace's lines in order, and a look at the next before it is their turn. A damaged one waits for its turn."""

    lines: Iterator[Line]
    _next: deque[Line] = field(factory=deque[Line])
    _broken: BadTrace | None = None

    def __iter__(self) -> Iterator[Line]:
        while self._next or self._more():
            yield self._next.popleft()
        if self._broken is not None:
            raise self._broken

    def _more(self) -> bool:
        try:
            self._next.append(next(self.lines))
        except BadTrace as error:
            self._broken = error
        except StopIteration:
            pass
        else:
            return True
        return False

    def picked(self, launch: Launch) -> dict[RequestId, Tokens]:
        """What each decode step of a launch that was just asked for has brought. Raises BadTrace if that is too far
        away."""
        missing = {ask.request for ask in launch.asks if isinstance(ask.effect, RunDecode)}
        found, seen, size = dict[RequestId, Tokens](), 0, 0
        while missing and (seen < len(self._next) or self._more()):
            line = self._next[seen]
            seen, size = seen + 1, size + line.size
            match line.record:
                case Envelope(happened=ForRequest(request, Decoded() | DeviceFailed() as outcome)) if (
                    request in missing
                ):
                    missing.remove(request)
                    found[request] = outcome.tokens if isinstance(outcome, Decoded) else ()
                case _ if size > AHEAD:
                    raise BadTrace(f"line {line.number}: no outcome yet of {show(launch)}")
        return found


@define(eq=False)
class Remembered(Proposer):
    """Proposes what the target picked when the trace was recorded: for each request, what its next decode step
    brought."""

    vocab: int
    picked: Mapping[RequestId, Tokens] = field(factory=dict[RequestId, Tokens])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        return [chain((request.state.tokens[-1], *self.coming(request))) for request in requests]

    def coming(self, request: DraftRequest) -> Tokens:
        """All but the last of the tokens that the next outcome brought; a trace is hostile input."""
        known = takewhile(lambda token: 0 <= token < self.vocab, self.picked.get(request.state.request, ())[:-1])
        return tuple(islice(known, min(request.most, request.depth, MOST)))

    def follow(
        self, step: Step, aux_hidden_states: Mapping[int, Tensor], kept: Sequence[Kept], states: Sequence[SlotState]
    ) -> None:
        """It knows what comes."""

    def catch_up(self, slot: int) -> None:
        """It knows what comes."""

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        """It knows what comes."""


@define
class Execution:
    """What the device answered to the asks so far, until the recorded outcome comes by. Of a launch that went on alone
    each step is carried out when it comes by, for each member: what it brought is proposed as in any other.

    Rows that were loaded are computed here: as soon as those before them are, as the device counts them.
    """

    executor: DeviceExecutor
    chunk: int
    stateful: bool
    remembered: Remembered
    ahead: Ahead
    answers: dict[RequestId, Outcome] = field(factory=dict[RequestId, Outcome])
    going: dict[RequestId, RunDecode] = field(factory=dict[RequestId, RunDecode])  # the next step of who goes on alone
    restores: dict[RequestId, RestoreBlocks] = field(factory=dict[RequestId, RestoreBlocks])
    valid: dict[RequestId, int] = field(factory=dict[RequestId, int])  # rows that are computed
    loaded: dict[RequestId, Span] = field(factory=dict[RequestId, Span])  # rows that wait for those before them
    tokens: int = 0

    async def carry_out(self, number: int, out: Output) -> None:
        match out:
            case Launch(asks) if any(isinstance(ask.effect, RunDecode) and ask.effect.steps > 1 for ask in asks):
                self.going |= {ask.request: ask.effect for ask in asks if isinstance(ask.effect, RunDecode)}
            case Launch(asks) if isinstance(asks[0].effect, CARRIED_OUT):
                if isinstance(asks[0].effect, RunDecode):
                    self.remembered.picked = self.ahead.picked(out)
                for ask, outcome in zip(asks, await self.executor.perform(out), strict=True):
                    self.answers[ask.request] = outcome
                    if isinstance(outcome, PrefillAdvanced):
                        self.valid[ask.request] = outcome.stop
                        await self.compute_loaded(number, ask.request)
            case EffectRequest(request, OpenSlot() as opening):
                self.valid[request] = opening.state if self.stateful else opening.keep
                self.executor.open(request, opening)
            case EffectRequest(request, RestoreBlocks() as restore):
                self.restores[request] = restore
            case _:
                pass

    async def compare(self, number: int, envelope: Envelope) -> None:
        match envelope.happened:
            case ForRequest(request, Decoded() as recorded):
                actual = await self.next_step(request, recorded) or self.answers.pop(request, None)
                if not isinstance(actual, Decoded) or (actual.tokens, actual.logprobs) != (
                    recorded.tokens,
                    recorded.logprobs,
                ):
                    raise differs(number, envelope, actual)
                self.tokens += len(recorded.tokens)
            case ForRequest(_, PrefillAdvanced(more=True)):
                pass  # the last word of that prefill says all of it
            case ForRequest(request, PrefillAdvanced(stop)):
                actual = self.answers.pop(request, None)
                if not isinstance(actual, PrefillAdvanced) or actual.stop != stop:
                    raise differs(number, envelope, actual)
            case ForRequest(request, BlocksRestored(start, stop)):
                self.loaded[request] = (start, stop)
                await self.compute_loaded(number, request)
            case ForRequest(request, DeviceFailed()):
                self.answers.pop(request, None)
                self.going.pop(request, None)
            case _:
                pass  # what is on the lane for it answers yet

    async def next_step(self, request: RequestId, recorded: Decoded) -> Outcome | None:
        """What a recorded step of who goes on alone brings here, or some steps at once."""
        step = self.going.pop(request, None)
        if step is None:
            return None
        if recorded.more and recorded.tokens:
            position = step.position + len(recorded.tokens)
            self.going[request] = evolve(step, position=position, token=recorded.tokens[-1], checkpoint=False)
        self.remembered.picked = {request: recorded.tokens}
        one = Launch((EffectRequest(request, evolve(step, propose=min(len(recorded.tokens) - 1, MOST), steps=1)),))
        return (await self.executor.perform(one))[0]

    async def compute_loaded(self, number: int, request: RequestId) -> None:
        """A recorded restore whose block may be gone is carried out as prefill: the same rows, bit for bit.

        The load may have been done before what is computed meanwhile; then these rows follow once that is there.
        """
        start, stop = self.loaded.get(request, (0, 0))
        if self.stateful:  # rows before `start` may be there without the state behind them, which is what was loaded
            start = min(start, self.valid.get(request, 0))
        if self.valid.get(request, 0) < start or start >= stop:
            return
        del self.loaded[request]
        slot = self.restores[request].slot
        for at in range(start, stop, self.chunk):
            chunk = RunPrefill(slot, at, min(at + self.chunk, stop))
            (outcome,) = await self.executor.perform(Launch((EffectRequest(request, chunk),)))
            if not isinstance(outcome, PrefillAdvanced):
                raise differs(number, f"rows {start}..{stop} of request {request} were restored", outcome)
        self.valid[request] = stop

    def forget(self, living: Set[RequestId]) -> None:
        """All others have left the world."""
        for kept in (self.answers, self.going, self.restores, self.valid, self.loaded):
            for request in kept.keys() - living:
                del kept[request]


def differs(number: int, recorded: object, executed: Outcome | None) -> Diverged:
    return Diverged(f"line {number}: {show(recorded)}\n  executed: {executed}")


async def execute(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    """The replay, up to and including event `until`, and how many tokens were compared.

    Raises BadTrace, Diverged or Refusal.
    """
    header, lines = read_sized(path)
    if header.redacted:
        raise UserError(f"{path} is redacted: it replays, but its tokens are gone and cannot be executed")
    try:
        target = await load_target(options_of(header, model), only=header.identity)
    except Mismatched as error:
        raise UserError(
            f"{path} was recorded with model and numerics {header.identity[:40]}, these are {error}: "
            "the tokens are only promised to be equal within one identity"
        ) from error
    try:
        run, remembered, ahead = Replay.of(header), Remembered(target.checkpoint.config.vocab_size), Ahead(lines)
        match = Grammars(Tokenizer.load(target.folder)).match
        executor = DeviceExecutor(evolve(target.executor.parts, proposer=remembered, match_grammar=match))
        execution = Execution(executor, header.settings.chunk, header.settings.stateful, remembered, ahead)
        for line in until_cut(shown(ahead)):
            envelope = line.record
            if not isinstance(envelope, Envelope):
                run.feed(line.number, envelope)
                continue
            if until is not None and envelope.seq > until:
                return run, execution.tokens
            outs = run.feed(line.number, envelope)
            await execution.compare(line.number, envelope)
            for out in outs:
                await execution.carry_out(line.number, out)
            execution.forget(run.world.requests.keys())
        run.finish()
        return run, execution.tokens
    finally:
        await target.close()


def shown(lines: Iterable[Line]) -> Iterator[Line]:
    with progress("executed lines") as step:
        for line in lines:
            yield line
            step()


def options_of(header: Header, model: str | None) -> Options:
    """What the trace was served with, as far as it decides the numbers. Raises Refusal: traces are hostile input."""
    names = (
        *("model", "device", "target_devices", "target_layer_split", "dtype", "max_ctx", "numerics", "slots", "chunk"),
        *("threads", "state_checkpoints", "quantize", "kv_dtype", "kv_memory"),
    )
    wanted: dict[str, Any] = {name: header.config[name] for name in names if name in header.config}
    if model is not None:
        wanted["model"] = model
    wanted |= {"disk_prefix_cache": "off", "host_cache_budget": 0, "draft": "none"}
    # What was left open was chosen then, by the memory that there was.
    chosen = {"slots": header.settings.slots, "max_ctx": header.settings.max_context}
    try:
        checked(wanted)
        options = checked(wanted | chosen)
    except CycloptsError as error:
        raise UserError(f"the trace's header: {error}") from error
    if any(one.address for one in options.devices):
        raise UserError("the trace's header: shards at tcp:// are not reached for a trace's sake")
    return options


def execute_file(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    return anyio.run(execute, path, model, until)
