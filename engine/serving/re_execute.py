"""Replay on the real model: the recorded effects are executed again, in order, and their tokens compared.

No draft is needed, whatever the trace was recorded with. What the target accepted then is proposed to it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import filterfalse, islice, takewhile
from pathlib import Path
from typing import Any

import anyio
from attrs import define, evolve, field
from cyclopts import CycloptsError
from torch import Tensor

from adapters.device.decode.prompt_along import goes_along
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
from engine.core.replay import Replay, ReplayDiffers, format_record, until_cut_line
from engine.core.trace import LINE_LIMIT, BadTrace, Header, TraceLine, read_trace_lines
from engine.loading.background_load import load_target
from engine.loading.identity import IdentityMismatch
from engine.settings.config_file import parse_values
from engine.settings.options import Options
from engine.settings.output.progress import count_progress
from engine.settings.user_error import UserError
from states.events import Event, list_request_events
from states.world import Output

EXECUTED = (RunPrefill, RunDecode)
MOST = 63  # tokens that are proposed in a row
AHEAD = LINE_LIMIT  # characters between a launch and its outcomes: room for the longest prompt to come in meanwhile


@define
class LineLookahead:
    """The lines of a trace in order, with a look ahead. A damaged line raises when its turn comes."""

    lines: Iterator[TraceLine]
    _next: deque[TraceLine] = field(factory=deque[TraceLine])
    _broken: BadTrace | None = None

    def __iter__(self) -> Iterator[TraceLine]:
        while self._next or self._read_line():
            yield self._next.popleft()
        if self._broken is not None:
            raise self._broken

    def _read_line(self) -> bool:
        try:
            self._next.append(next(self.lines))
        except BadTrace as error:
            self._broken = error
        except StopIteration:
            pass
        else:
            return True
        return False

    def collect_recorded_tokens(self, launch: Launch) -> dict[RequestId, Tokens]:
        """Return the tokens that each decode step of a launch brought when it was recorded.

        Raises BadTrace if its outcomes are too far ahead.
        """
        missing = {
            effect_request.request
            for effect_request in launch.effect_requests
            if isinstance(effect_request.effect, RunDecode)
        }
        found = dict[RequestId, Tokens]()
        seen = 0
        size = 0
        while missing and (seen < len(self._next) or self._read_line()):
            line = self._next[seen]
            seen = seen + 1
            size = size + line.size
            events = list_request_events(line.record.happened) if isinstance(line.record, Envelope) else ()
            for request, outcome in events:
                if request in missing and isinstance(outcome, Decoded | DeviceFailed):
                    missing.remove(request)
                    found[request] = outcome.tokens if isinstance(outcome, Decoded) else ()
            if missing and size > AHEAD:
                raise BadTrace(f"line {line.number}: no outcome yet of {format_record(launch)}")
        return found


@define(eq=False)
class RecordedProposer(Proposer):
    """Proposes the tokens that the recorded decode steps brought. recorded: of the next decode step, by request."""

    vocab: int
    recorded: Mapping[RequestId, Tokens] = field(factory=dict[RequestId, Tokens])

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        return [chain((request.state.tokens[-1], *self.list_upcoming(request))) for request in requests]

    def list_upcoming(self, request: DraftRequest) -> Tokens:
        """Return all but the last token of the next outcome. Tokens are checked, since a trace is hostile input."""
        known = takewhile(lambda token: 0 <= token < self.vocab, self.recorded.get(request.state.request, ())[:-1])
        return tuple(islice(known, min(request.most, request.depth, MOST)))

    def follow(
        self,
        step: Step,
        aux_hidden_states: Mapping[int, Tensor],
        kept: Sequence[Kept],
        states: Sequence[SlotState],
        plain_steps: int = 0,
    ) -> None:
        """It knows what comes."""

    def catch_up(self, slot: int) -> None:
        """It knows what comes."""

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        """It knows what comes."""


@define
class TraceExecution:
    """Executes recorded effects, and holds their outcomes until the recorded ones come.

    Of a launch of several steps each step is executed when its outcome comes, for each request; what it brought is
    proposed as in any other launch. Rows that were restored are computed here, as soon as the rows before them are.
    """

    executor: DeviceExecutor
    chunk: int
    stateful: bool
    proposer: RecordedProposer
    lookahead: LineLookahead
    outcomes: dict[RequestId, Outcome] = field(factory=dict[RequestId, Outcome])
    # the next step of who goes on alone
    pending_steps: dict[RequestId, RunDecode] = field(factory=dict[RequestId, RunDecode])
    # of prompts that go along with several steps
    pending_rows: dict[RequestId, RunPrefill] = field(factory=dict[RequestId, RunPrefill])
    restores: dict[RequestId, RestoreBlocks] = field(factory=dict[RequestId, RestoreBlocks])
    computed_rows: dict[RequestId, int] = field(factory=dict[RequestId, int])  # rows that are computed
    waiting_rows: dict[RequestId, Span] = field(factory=dict[RequestId, Span])  # rows that wait for those before them
    tokens: int = 0

    async def carry_out(self, number: int, out: Output) -> None:
        if isinstance(out, Launch):
            for effect_request in filter(goes_along, out.effect_requests):
                assert isinstance(effect_request.effect, RunPrefill), effect_request
                self.pending_rows[effect_request.request] = effect_request.effect
            out = evolve(out, effect_requests=tuple(filterfalse(goes_along, out.effect_requests)))
        match out:
            case Launch(effect_requests) if any(
                isinstance(effect_request.effect, RunDecode) and effect_request.effect.steps > 1
                for effect_request in effect_requests
            ):
                self.pending_steps |= {
                    effect_request.request: effect_request.effect
                    for effect_request in effect_requests
                    if isinstance(effect_request.effect, RunDecode)
                }
            case Launch(effect_requests) if effect_requests and isinstance(effect_requests[0].effect, EXECUTED):
                if isinstance(effect_requests[0].effect, RunDecode):
                    self.proposer.recorded = self.lookahead.collect_recorded_tokens(out)
                for effect_request, outcome in zip(effect_requests, await self.executor.perform(out), strict=True):
                    self.outcomes[effect_request.request] = outcome
                    if isinstance(outcome, PrefillAdvanced):
                        self.computed_rows[effect_request.request] = outcome.stop
                        await self.compute_loaded(number, effect_request.request)
            case EffectRequest(request, OpenSlot() as opening):
                self.computed_rows[request] = opening.state if self.stateful else opening.keep
                self.executor.open(request, opening)
            case EffectRequest(request, RestoreBlocks() as restore):
                self.restores[request] = restore
            case _:
                pass

    async def compare(self, number: int, envelope: Envelope) -> None:
        """Compare a recorded event with what was executed. Raises ReplayDiffers."""
        for request, event in list_request_events(envelope.happened):
            await self.compare_event(number, envelope, request, event)

    async def compare_event(self, number: int, envelope: Envelope, request: RequestId, event: Event) -> None:
        """Compare what happened to one request. envelope: the recorded event, for the message."""
        match event:
            case Decoded() as recorded:
                actual = await self.next_step(request, recorded) or self.outcomes.pop(request, None)
                if not isinstance(actual, Decoded) or (actual.tokens, actual.logprobs) != (
                    recorded.tokens,
                    recorded.logprobs,
                ):
                    raise build_difference(number, envelope, actual)
                self.tokens += len(recorded.tokens)
            case PrefillAdvanced(more=True):
                pass  # the last word of that prefill says all of it
            case PrefillAdvanced(stop):
                if (along := self.pending_rows.pop(request, None)) is not None:
                    await self.compute_along(number, request, along, stop)
                actual = self.outcomes.pop(request, None)
                if not isinstance(actual, PrefillAdvanced) or actual.stop != stop:
                    raise build_difference(number, envelope, actual)
            case BlocksRestored(start, stop):
                self.waiting_rows[request] = (start, stop)
                await self.compute_loaded(number, request)
            case DeviceFailed():
                self.outcomes.pop(request, None)
                self.pending_steps.pop(request, None)
                self.pending_rows.pop(request, None)
            case _:
                pass  # what is on the lane for it answers yet

    async def next_step(self, request: RequestId, recorded: Decoded) -> Outcome | None:
        """Execute the next step of a launch of several steps. Returns None if the request is in none."""
        step = self.pending_steps.pop(request, None)
        if step is None:
            return None
        if recorded.more and recorded.tokens:
            position = step.position + len(recorded.tokens)
            self.pending_steps[request] = evolve(step, position=position, token=recorded.tokens[-1], checkpoint=False)
        self.proposer.recorded = {request: recorded.tokens}
        launch = Launch((EffectRequest(request, evolve(step, propose=min(len(recorded.tokens) - 1, MOST), steps=1)),))
        return (await self.executor.perform(launch))[0]

    async def compute_along(self, number: int, request: RequestId, effect: RunPrefill, stop: int) -> None:
        """Compute the rows of a prompt that went along with decode steps as far as `stop`, by themselves."""
        own = evolve(effect, stop=stop, forward_rows=0)
        if stop < effect.stop:
            own = evolve(own, checkpoint=False, device_checkpoint=None)
        (self.outcomes[request],) = await self.executor.perform(Launch((EffectRequest(request, own),)))
        self.computed_rows[request] = stop
        await self.compute_loaded(number, request)

    async def compute_loaded(self, number: int, request: RequestId) -> None:
        """Compute recorded restored rows as prefill, since their blocks may be gone. The rows are equal bit for bit.

        The restore may have ended before the rows in front of it were computed. Then these rows follow once those are
        there.
        """
        start, stop = self.waiting_rows.get(request, (0, 0))
        if self.stateful:  # rows before `start` may be there without the state behind them, which is what was loaded
            start = min(start, self.computed_rows.get(request, 0))
        if self.computed_rows.get(request, 0) < start or start >= stop:
            return
        del self.waiting_rows[request]
        slot = self.restores[request].slot
        for at in range(start, stop, self.chunk):
            chunk = RunPrefill(slot, at, min(at + self.chunk, stop))
            (outcome,) = await self.executor.perform(Launch((EffectRequest(request, chunk),)))
            if not isinstance(outcome, PrefillAdvanced):
                raise build_difference(number, f"rows {start}..{stop} of request {request} were restored", outcome)
        self.computed_rows[request] = stop

    def forget_ended(self, living: Set[RequestId]) -> None:
        """Forget all requests that have left the world."""
        held = (self.outcomes, self.pending_steps, self.pending_rows, self.restores)
        for kept in (*held, self.computed_rows, self.waiting_rows):
            for request in kept.keys() - living:
                del kept[request]


def build_difference(number: int, recorded: object, executed: Outcome | None) -> ReplayDiffers:
    return ReplayDiffers(f"line {number}: {format_record(recorded)}\n  executed: {executed}")


async def execute(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    """Execute a trace up to and including the event with number `until`, for `rekindle replay --execute`.

    Return the replay, and how many tokens were compared. model: a name or path that replaces that of the trace. Raises
    BadTrace for a file that is no trace, ReplayDiffers for another decision or token, and UserError for a redacted
    trace or another identity.
    """
    header, lines = read_trace_lines(path)
    if header.redacted:
        raise UserError(f"{path} is redacted: it can be replayed, but not executed, because it holds no tokens")
    try:
        target = await load_target(read_options(header, model), only=header.identity)
    except IdentityMismatch as error:
        raise UserError(
            f"{path} was recorded with model and numerics {header.identity[:40]}, these are {error}: "
            "the tokens are only promised to be equal within one identity"
        ) from error
    try:
        run = Replay.from_header(header)
        remembered = RecordedProposer(target.checkpoint.config.vocab_size)
        ahead = LineLookahead(lines)
        match = Grammars(Tokenizer.load(target.folder)).match
        executor = DeviceExecutor(evolve(target.executor.parts, proposer=remembered, match_grammar=match))
        execution = TraceExecution(executor, header.settings.chunk, header.settings.stateful, remembered, ahead)
        for line in until_cut_line(with_progress(ahead)):
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
            execution.forget_ended(run.world.requests.keys())
        run.finish(execution.tokens)
        return run, execution.tokens
    finally:
        await target.close()


def with_progress(lines: Iterable[TraceLine]) -> Iterator[TraceLine]:
    with count_progress("executed lines") as step:
        for line in lines:
            yield line
            step()


def read_options(header: Header, model: str | None) -> Options:
    """Return the options of a trace that decide its numbers. Raises UserError, since traces are hostile input."""
    names = (
        *("model", "device", "target_devices", "target_layer_split", "dtype", "max_ctx", "numerics", "slots", "chunk"),
        *("threads", "state_checkpoints", "quantize", "kv_dtype", "kv_memory", "cpu_experts"),
    )
    wanted: dict[str, Any] = {name: header.config[name] for name in names if header.config.get(name) is not None}
    if model is not None:
        wanted["model"] = model
    wanted |= {"disk_prefix_cache": "off", "host_cache_budget": 0, "draft": "none"}
    # What was left open was chosen then, by the memory that there was.
    chosen = {"slots": header.settings.serving_slots, "max_ctx": header.settings.max_context}
    if header.config.get("state_checkpoints", 0) is None:
        chosen["state_checkpoints"] = header.settings.state_checkpoints
    try:
        parse_values(wanted)
        options = parse_values(wanted | chosen)
    except CycloptsError as error:
        raise UserError(f"the trace's header: {error}") from error
    if any(location.address for location in options.placement.locations):
        raise UserError("the trace was recorded with shards at tcp://, which a replay does not contact")
    return options


def execute_file(path: Path, model: str | None, until: int | None = None) -> tuple[Replay, int]:
    return anyio.run(execute, path, model, until)
