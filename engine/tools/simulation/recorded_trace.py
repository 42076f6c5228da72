"""Reads recorded traces as logs: the jobs, their answers, and how long the device really took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from attrs import define, evolve, field

from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, Tokens
from effects.job import Job
from effects.lookup import PrefixFound
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored
from effects.stream import CloseStream, EmitTokens
from engine.core.event_loop import Envelope
from engine.core.trace import BadTrace, Record, read_trace
from engine.tools.simulation.logs.logged_requests import MOST_REQUESTS, Agent, BadLog, Request, Session
from engine.tools.simulation.simulated_costs import Costs, MeasuredCosts
from states.events import ForRequest, Submitted, list_request_events
from states.settings import Settings


@define
class RecordedTrace:
    """The parts of a trace that a simulation uses."""

    session: Session
    settings: Settings
    measured: MeasuredCosts


@define
class Collector:
    """Collects what a simulation needs from a trace's records, which are fed to it in order."""

    jobs: dict[RequestId, tuple[int, Job]] = field(factory=dict[RequestId, "tuple[int, Job]"])
    agents: list[list[RequestId]] = field(factory=list["list[RequestId]"])  # requests of each agent, in order of time
    answers: dict[RequestId, list[int]] = field(factory=dict[RequestId, "list[int]"])
    chunks: list[tuple[float, float]] = field(factory=list["tuple[float, float]"])
    decode_steps: list[tuple[float, float]] = field(factory=list["tuple[float, float]"])
    loads: dict[str, list[float]] = field(factory=dict[str, "list[float]"])
    token_bytes: int = 0
    # Every load of rows came with the state of this many tokens.
    state_tokens: int = 0
    _launched: dict[RequestId, RunPrefill | RunDecode] = field(factory=dict[RequestId, "RunPrefill | RunDecode"])
    _alone: bool = False
    _tiers: dict[RequestId, str] = field(factory=dict[RequestId, str])
    _closed: set[RequestId] = field(factory=set[RequestId])

    def feed(self, record: Record) -> None:
        match record:
            case Envelope(_, at_ns, ForRequest(request, Submitted(job))):
                self.add_job(request, job)
                self.jobs[request] = (at_ns, job)
            case Envelope(_, _, happened):
                for request, event in list_request_events(happened):
                    self.add_event(request, event)
            case EffectRequest(request, EmitTokens(tokens)):
                self.answers.setdefault(request, []).extend(tokens)
            case EffectRequest(request, CloseStream()):
                self._closed.add(request)
            case Launch(effect_requests):
                self._alone = len(effect_requests) == 1
                for effect_request in effect_requests:
                    if isinstance(effect_request.effect, RunPrefill | RunDecode):
                        self._launched[effect_request.request] = effect_request.effect
            case _:
                pass

    def add_job(self, request: RequestId, job: Job) -> None:
        """Add a job to an agent.

        It belongs to the agent whose last prompt it continues, if that one was answered. If several match, the longest
        prompt wins. If none matches, it begins a new agent.
        """
        best = None
        length = 0
        for agent in self.agents:
            before = self.jobs[agent[-1]][1].prompt
            if agent[-1] in self._closed and length < len(before) and is_continuation(job.prompt, before):
                best = agent
                length = len(before)
        if best is None:
            self.agents.append([request])
        else:
            best.append(request)

    def add_event(self, request: RequestId, event: object) -> None:
        launched = self._launched.get(request)
        match event, launched:
            case PrefillAdvanced(stop, ns), RunPrefill(start=start) if ns and stop > start:
                self.chunks.append(((start + stop) / 2, ns / (stop - start)))
            case Decoded(ns=ns), RunDecode(position=position, propose=0) if ns and self._alone:
                self.decode_steps.append((position, ns))
            case PrefixFound(tier=tier), _:
                self._tiers[request] = tier
            case BlocksRestored(start, stop, size, ns=ns), _ if moved := stop - start + self.state_tokens:
                self.token_bytes = self.token_bytes or size // moved
                if ns and request in self._tiers:
                    self.loads.setdefault(self._tiers[request], []).append(ns / moved)
            case _:
                pass

    def build_session(self, name: str, tokens: Callable[[Tokens], Tokens]) -> Session:
        start = min(at_ns for at_ns, _ in self.jobs.values())
        made = {request: self.build_request(request, start, tokens) for request in self.jobs}
        return Session(name, tuple(Agent(tuple(made[request] for request in agent)) for agent in self.agents))

    def build_request(self, request: RequestId, start: int, tokens: Callable[[Tokens], Tokens]) -> Request:
        at_ns, job = self.jobs[request]
        answer = tuple(self.answers.get(request, ())) or job.prompt[-1:]
        boundaries = tuple(sorted({at for at in job.boundaries if 0 < at <= len(job.prompt)}))
        return Request(at_ns - start, (tokens(job.prompt),), tokens(answer), boundaries)


def read_recorded(path: Path) -> RecordedTrace:
    """Read a trace. Raises BadLog.

    A request that was cut short counts as one that wanted no more than it got. A request that continues an answered one
    belongs to the same agent, so it is never sent before that answer.
    """
    collector = Collector()
    try:
        header, records = read_trace(path)
        collector.state_tokens = header.settings.state_tokens
        for number, record in records:
            collector.feed(record)
            if len(collector.jobs) > MOST_REQUESTS:
                raise BadLog(f"{path}: line {number}: more than {MOST_REQUESTS} requests")
    except BadTrace as error:
        raise BadLog(str(error)) from error
    if not collector.jobs:
        raise BadLog(f"{path}: no request was recorded in it")
    if any(not job.prompt for _, job in collector.jobs.values()):
        raise BadLog(f"{path}: a prompt without tokens was recorded in it")
    loads = {tier: tuple(values) for tier, values in collector.loads.items() if tier in Costs().loads}
    measured = MeasuredCosts(
        tuple(collector.chunks), tuple(collector.decode_steps), loads, collector.token_bytes, collector.state_tokens
    )
    return RecordedTrace(collector.build_session(path.name, number_tokens()), header.settings, measured)


def is_continuation(prompt: Tokens, before: Tokens) -> bool:
    """Return whether a prompt begins with another one and goes on."""
    return len(before) < len(prompt) and prompt[len(before) - 1] == before[-1] and prompt[: len(before)] == before


def number_tokens() -> Callable[[Tokens], Tokens]:
    """Return a function that numbers tokens in the order in which they first occur.

    Tokens of a redacted trace are too large to be used as indexes.
    """
    numbers: dict[int, int] = {}

    def tokens(given: Tokens) -> Tokens:
        return tuple(numbers.setdefault(token, len(numbers)) for token in given)

    return tokens


def merge_traces(parts: Iterable[MeasuredCosts]) -> MeasuredCosts:
    """Return what several traces measured together."""
    total = MeasuredCosts()
    for part in parts:
        loads = {tier: (*total.loads.get(tier, ()), *values) for tier, values in part.loads.items()}
        total = evolve(
            total,
            chunks=total.chunks + part.chunks,
            decode_steps=total.decode_steps + part.decode_steps,
            loads={**total.loads, **loads},
            token_bytes=total.token_bytes or part.token_bytes,
        )
    return total
