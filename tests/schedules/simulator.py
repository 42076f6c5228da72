"""The real fold, and executors that answer in whatever order a seed decides, checked at every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

from attrs import define, evolve, field

from adapters.device.lane.running_batch import merge_steps
from effects.all import EffectRequest, Launch, Outcome
from effects.compression import Compression, PromptPart
from effects.decode import Decoded
from effects.ids import MAIN, PROMPTS, DeviceFailed, LaneId, RequestId, SlotId, StoreFailed, Tokens
from effects.job import Job, Sampling, explain_no_compression, find_aged_messages, freezes_messages
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.prompt_compression import KeepFrozen
from effects.restore import BlocksRestored
from effects.scope import Scope
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from effects.timer import StartTimer
from states.events import (
    Cancelled,
    EffectOutcome,
    Event,
    ForEngine,
    ForLaunch,
    ForRequest,
    Happened,
    SlotsLost,
    Submitted,
    TimerElapsed,
)
from states.invariants import check_world
from states.kept_rows import make_prompt
from states.rates import Rates, TimedStep
from states.request_states import Speculating
from states.residency import IDLE_LOCATION, Resolved, get_action_after_use
from states.settings import Settings
from states.world import Output, advance, make_world
from tests.schedules.device import (
    Answer,
    CheckedStore,
    CheckedTransfer,
    Device,
    answer_of,
    as_frozen,
    rows_of,
    shortened,
)
from tests.states.builders import is_of_pace

SCOPES = (*(Scope("full"),) * 4, Scope("off"), Scope("fixed", 9), Scope("auto", 2), Scope("auto", 30))
REASONS = ("client_gone", "deadline", "stop_string", "shutdown")
RESIDENCIES = (
    Resolved(),
    Resolved("request-scoped", "park"),
    Resolved("request-scoped", "release"),
    Resolved("persistent", "keep", "keep"),
)
SALTED = (2, 4)  # two of every five jobs have a salt: they continue from slots of one another, and no other job does
OF_LAUNCHES = (Decoded, PrefillAdvanced, DeviceFailed)
OF_STORE = (PrefixFound, PrefixMissed, BlocksRestored, SnapshotSaved, StoreFailed)
MINUTE_PASSES = 0.03  # between two steps
EVENTS_MAX = 5_000  # far more than any schedule needs: a livelock is a failure


def taken(tokens: Tokens, state: Speculating) -> int:
    """Return how many of the tokens the answer takes: up to a stop token or its limit. Tokens that the client has from
    before a loss count too.
    """
    stops = [at + 1 for at, token in enumerate(tokens) if token in state.prompt.job.stop_tokens]
    return min(len(tokens), state.prompt.job.max_tokens - len(state.answer.tokens), *stops)


def goes_on(outcome: Event) -> bool:
    return isinstance(outcome, Decoded | PrefillAdvanced) and outcome.more


def ends(outcome: Event) -> bool:
    """Is it the last that a launch has of a member? The store may answer while the member's front is computed."""
    return not goes_on(outcome) and not isinstance(outcome, OF_STORE)


@define
class Client:
    """A client: everything that it has received, and what it may still receive."""

    job: Job
    served: Tokens
    cancelled: set[str] = field(factory=set)
    tokens: Tokens = ()
    closing: CloseStream | None = None
    counted: tuple[int, int, int] = (0, 0, 0)  # decode steps, proposals, proposals among the tokens
    losses: int = 0  # how often its slot's rows were lost

    def count(self, done: Decoded, heard: int) -> None:
        decode_steps, proposed, accepted = self.counted
        self.counted = decode_steps + done.steps, proposed + done.proposed, accepted + min(done.accepted, heard)

    def lose(self) -> None:
        """It starts again, once."""
        self.losses += 1
        if self.losses == 1 and self.closing is None:
            self.counted = (0, 0, 0)

    def hear(self, effect: ReportProgress | EmitTokens | CloseStream) -> None:
        assert self.closing is None, "a word after the last one"
        match effect:
            case ReportProgress(done, total, cached):
                assert 0 <= cached <= done <= total
            case EmitTokens(tokens):
                self.tokens += tokens
            case CloseStream():
                self.closing = effect

    def check(self, settings: Settings, *, failures: bool) -> None:
        """The answer is that of a request that was alone, as far as it came, and ended for the reason given."""
        assert self.closing is not None, "a stream that never closed"
        finish, report, job = self.closing.finish, self.closing.report, self.job
        may_shorten = not explain_no_compression(job, settings.scorer_max_tokens)
        made = thawed(job) if freezes_messages(job) else shortened(job.prompt) if may_shorten else job.prompt
        assert self.served in (make_prompt(job).tokens, made)
        assert self.tokens == answer_of(self.served, job.sampling.seed, len(self.tokens)), "another answer than alone"
        assert len(self.tokens) <= job.max_tokens
        assert not set(self.tokens[:-1]) & set(job.stop_tokens), "tokens after a stop token"
        stopped = bool(set(self.tokens[-1:]) & set(job.stop_tokens))
        match finish:
            case "stop":
                assert stopped or "stop_string" in self.cancelled
            case "too_long" | "uncompressed":
                assert not self.tokens
                assert len(self.served) + job.max_tokens > settings.max_context
            case "length":
                assert len(self.tokens) == job.max_tokens
                assert not stopped
            case "failed" | "lost":
                assert failures
            case "queue_full":
                assert not self.tokens
            case "cancelled":
                assert "client_gone" in self.cancelled
            case _:
                assert finish in self.cancelled
        if finish != "queue_full":
            decided = len(made) if not self.tokens else 0  # and the slot not yet opened
            assert report.prompt_tokens in {len(self.served), decided}
        assert report.completion_tokens == len(self.tokens)
        assert report.restored_tokens < max(report.prompt_tokens, 1)
        assert (report.tier == "none") == (report.restored_tokens == 0)
        assert (report.decode_steps, report.proposed, report.accepted) == self.counted
        assert 0 <= report.accepted <= report.proposed

    def check_kept(self, settings: Settings, tokens: Tokens, shared: int) -> None:
        """Nothing is kept that the scope does not allow."""
        scope, prompt = self.job.scope, self.job.prompt
        assert settings.store, "there is nothing to keep it in"
        assert len(tokens) + settings.block_size > settings.min_tokens, "so few tokens are not worth keeping"
        match scope.kind:
            case "full" if self.losses and tokens == make_prompt(self.job).tokens[: len(tokens)]:
                pass  # kept before the loss; it was compressed only then
            case "full":
                assert (
                    tokens
                    == (*self.served, *self.tokens, *tokens[len(self.served) + len(self.tokens) :])[: len(tokens)]
                )
            case "auto":
                assert tokens == prompt[: min(shared, len(tokens))]
            case "fixed":
                assert tokens == prompt[: min(scope.count, len(tokens))]
            case "off":
                raise AssertionError("kept although nothing should be")


def thawed(job: Job) -> Tokens:
    """Return the tokens that are served once all aged messages are frozen."""
    waiting = find_aged_messages(job)
    parts = tuple(as_frozen(part) if part in waiting else part for part in job.compression.parts)
    return make_prompt(evolve(job, compression=evolve(job.compression, parts=parts))).tokens


def take_prompts_along(settings: Settings, rng: random.Random) -> Settings:
    """The same, and prompts may go along with several steps. It has a generator of its own, so that nothing else of a
    schedule changes.
    """
    if not settings.mixed_rows or settings.max_proposals or rng.random() < 0.3:
        return settings
    return evolve(settings, mixed_launches=True, commits_per_segment=settings.stateful and rng.random() < 0.5)


class Simulator:
    """Some requests, one house. `run` plays them to the end; a wrong step raises AssertionError."""

    def __init__(
        self, seed: int, settings: Settings | None = None, jobs: list[Job] | None = None, *, calm: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.failures = 0.0 if calm else self.rng.choice((0.0, 0.0, 0.03, 0.15))
        self.cancels = 0.0 if calm else self.rng.choice((0.0, 0.01, 0.04))
        self.losses = 0.0 if calm else self.rng.choice((0.0, 0.0, 0.01, 0.05))
        self.arrivals = self.rng.choice((0.01, 0.05, 0.2))
        self.settings = settings or take_prompts_along(self.some_settings(), random.Random(seed))
        self.store = CheckedStore(self.settings, self.rng, self.failures)
        self.device = Device(self.settings, self.rng, self.store, self.failures)
        self.jobs = self.some_jobs() if jobs is None else jobs
        self.remember(self.jobs)
        self.world = make_world(self.settings)
        self.clients: dict[RequestId, Client] = {}
        self.salts: dict[int, str] = {}  # of whom the rows in a slot are
        self.checkpoints: dict[int, str] = {}  # and the state in a place
        self.lost: set[int] = set()  # slots whose loss was reported to the core, and that were not opened since
        self.launched: dict[LaneId, set[RequestId]] = {}  # members of each lane's launch that have not answered
        self.entering: list[Launch] = []  # decided, and not yet on the device's lane
        self.loading: list[EffectRequest] = []  # asked of the store
        self.answers: list[Answer] = []  # on their way back
        self.timers: list[TimerElapsed] = []  # of snapshots, that run; each may be over at any moment
        self.trim_timers: list[TimerElapsed] = []  # there is nearly always one: they are over less often
        self.minutes = random.Random(seed)  # of these, so that they change nothing of what else happens
        self.may_copy: dict[RequestId, bool] = {}  # snapshots: the last pace that each one's saver got
        self.pace_of_steps = PaceSteps(evenly=False)
        self.history: list[tuple[Happened, tuple[Output, ...]]] = []

    def some_settings(self) -> Settings:
        rng = self.rng
        block_size, slots = rng.choice((1, 2, 4)), rng.randint(1, 4)
        stateful, block = rng.random() < 0.4, rng.choice((0, 0, 1, 4, 7))
        decode_steps = rng.choice(
            (
                (),
                (
                    TimedStep(0, 1, 0, 20, 0),
                    TimedStep(0, 1, 4, 25, 20),
                    TimedStep(0, 1, 8, 30, 10),
                    TimedStep(0, 2, 0, 30, 0),
                ),
                (TimedStep(0, 1, 0, 20, 0), TimedStep(0, 1, 4, 50, 20)),
            )
        )
        chunk, prompt_lane_min_rows = (
            block_size * rng.choice((1, 2, 4)),
            0 if stateful or block else rng.choice((0, 1, 2, 5)),
        )
        return Settings(
            slots=slots,
            max_context=80,
            pages=rng.choice((0, 10, 12, 20, 10 * slots)),
            page=8,
            shares_pages=not stateful and rng.random() < 0.6,
            max_queue=rng.choice((0, 2, 20)),
            chunk=chunk,
            block_size=block_size,
            keep_decoded=rng.random() < 0.7,
            batch_rows=rng.choice((1, 4, 16)),
            mixed_rows=rng.choice((0, 0, 2, 8)),
            prompt_lane_min_rows=prompt_lane_min_rows,
            store=rng.random() < 0.6,
            max_proposals=block,
            max_copied=rng.choice((0, 0, 3, 7)),
            max_branch=0 if stateful else rng.choice((0, 7)),
            residency=rng.choice(RESIDENCIES),
            scorer_max_tokens=rng.choice((0, 0, 60, 200)),
            min_tokens=rng.choice((0, 0, 7)),
            stateful=stateful,
            state_checkpoints=rng.choice((0, 1, 2, 5)),
            state_tokens=rng.choice((0, 3)),
            checkpoint_interval=rng.choice((0, 3, 8)),
            shared_checkpoint_limit=rng.choice((0, 12)),
            chunks_per_prefill=1 if chunk <= prompt_lane_min_rows else rng.choice((1, 1, 3)),
            latency_target_ns=rng.choice((0, 150, 10**9)),
            rates=rng.choice((Rates(), Rates(prefill=(50,), loads={"host": 10, "disk": 90}, decode=decode_steps))),
        )

    def some_jobs(self) -> list[Job]:
        """New prompts, continued ones, and ones that leave a common path half-way."""
        rng, jobs = self.rng, list[Job]()
        for number in range(rng.randint(1, 10)):
            stem: Tokens = ()
            if jobs and rng.random() < 0.8:
                earlier = rng.choice(jobs)
                said = answer_of(earlier.prompt, earlier.sampling.seed, rng.randint(0, 8))
                stem = (*earlier.prompt, *said)[: rng.choice((8, 16, 30))]
            prompt = (*stem, *(rng.randint(1, 10) for _ in range(rng.randint(1, 14))))
            speculate = rng.random() < 0.9
            how = (rng.choice(("off", "auto", "auto", "auto", "always")), rng.choice((6, 14)))
            sampling = Sampling(seed=rng.randint(0, 1))
            scope, stops = rng.choice(SCOPES), rng.choice(((), (0,), (0, 3)))
            messages = tuple(at for at in range(1, len(prompt) + 1) if rng.random() < 0.3)
            compression = Compression(*how, continues=rng.random() < 0.1, tools=rng.random() < 0.1)
            if number % 4 == 3:
                parts = tuple(self.some_parts(len(prompt)))
                compression = evolve(compression, parts=parts, continues=True, freeze=True, least=2)
            job = Job(prompt, rng.randint(1, 9), sampling, stops, scope, messages, compression, speculate)
            job = evolve(job, opens=number % 3 == 1)
            jobs.append(evolve(job, salt="a") if number % 5 in SALTED else job)
        return jobs

    def some_parts(self, length: int) -> Iterator[PromptPart]:
        """Yield the parts of a conversation: the first message stays as it is, others have aged, and some of those are
        frozen.
        """
        edges = sorted({self.rng.randint(0, length) for _ in range(4)})
        for number, (start, stop) in enumerate(pairwise(edges)):
            part = PromptPart("user", start, stop, keep=500 * (number > 0), name=f"{start}" if number else "")
            yield as_frozen(part) if number and self.rng.random() < 0.4 else part

    def remember(self, jobs: list[Job]) -> None:
        """Fill the store with what an earlier process of the server left."""
        for job in jobs:
            for prompt in (job.prompt, shortened(job.prompt)):
                if self.rng.random() < 0.4:
                    self.store.keep(prompt[: self.rng.randint(1, len(prompt))])
                if self.settings.stateful:
                    kept = [tokens for tokens in self.store.kept if self.rng.random() < 0.5]
                    self.store.marks.update(kept)
                if self.rng.random() < 0.2:
                    self.store.recent.append(prompt)

    def run(self) -> None:
        waiting = list(enumerate(self.jobs))
        while waiting or self.busy():
            assert len(self.history) < EVENTS_MAX, "a schedule without an end"
            if waiting and (self.rng.random() < self.arrivals or not self.busy()):
                number, job = waiting.pop(0)
                self.submit(RequestId(number), job)
            elif self.clients and self.rng.random() < self.cancels:
                self.cancel(self.rng.choice(list(self.clients)))
            elif self.rng.random() < self.losses:
                self.lose()
            else:
                self.rng.choice(self.possible())()
            if self.trim_timers and self.minutes.random() < MINUTE_PASSES:
                self.happen(ForEngine(self.trim_timers.pop()))
        self.check_the_end()

    def busy(self) -> bool:
        device = self.device
        on_device = device.lane or device.prompt_lane or device.taking
        return bool(self.answers or self.entering or self.loading or self.timers or on_device)

    def possible(self) -> list[Callable[[], None]]:
        steps = [
            (self.answers, self.deliver),
            (self.entering, self.enter),
            (self.loading, self.load),
            (self.device.lane, self.work),
            (self.device.prompt_lane and self.device.are_slots_open, self.work_prompt_lane),
            (self.takeable(), self.take),
            (self.timers, self.elapse),
        ]
        return [step for due, step in steps if due]

    def submit(self, request: RequestId, job: Job) -> None:
        self.clients[request] = Client(job, make_prompt(job).tokens)
        self.feed(request, Submitted(job))

    def cancel(self, request: RequestId) -> None:
        reason = self.rng.choice(REASONS)
        client = self.clients[request]
        if client.closing is None:
            client.cancelled.add(reason)
        self.feed(request, Cancelled(reason))

    def lose(self) -> None:
        """The rows of some slots, or of all."""
        numbers = range(self.settings.slots)
        gone = [slot for slot in numbers if self.rng.random() < 0.5] or list(numbers)
        for slot in gone:
            self.device.lose(slot)
        self.lost |= set(gone)
        for slot in gone:
            holder = self.world.slots.slots[slot].holder
            if holder is not None:
                self.clients[holder].lose()
        self.happen(ForEngine(SlotsLost(tuple(map(SlotId, gone)))))

    def deliver(self) -> None:
        """Deliver an answer, or several of launches at once, which are one event then."""
        request, outcome = self.answered(self.rng.randrange(len(self.answers)))
        together = {request: outcome}
        while isinstance(outcome, OF_LAUNCHES) and self.rng.random() < 0.5:
            others = [
                at
                for at, (whose, what) in enumerate(self.answers)
                if whose not in together and isinstance(what, OF_LAUNCHES)
            ]
            if not others:
                break
            request, outcome = self.answered(self.rng.choice(others))
            together[request] = outcome
        for request, outcome in together.items():
            self.note_answer(request, outcome)
        if len(together) == 1:
            self.feed(request, outcome)
        else:
            self.happen(ForLaunch(tuple(EffectOutcome(*one) for one in together.items())))

    def note_answer(self, request: RequestId, outcome: Outcome) -> None:
        if ends(outcome):
            for members in self.launched.values():
                members.discard(request)
        state = self.world.requests.get(request)
        if isinstance(state, Speculating) and isinstance(outcome, Decoded):
            self.clients[request].count(outcome, taken(outcome.tokens, state))

    def answered(self, index: int) -> Answer:
        """One of the answers. What a launch brings comes in order; plain steps, and chunks, come one by one, or several
        at once.
        """
        request, outcome = self.answers[index]
        if not isinstance(outcome, OF_LAUNCHES):
            return self.answers.pop(index)
        its = [
            at for at, (whose, what) in enumerate(self.answers) if whose == request and isinstance(what, OF_LAUNCHES)
        ]
        count = self.rng.choice((1, 1, 2, 9))
        some = [one for one in (self.answers[at][1] for at in its[:count]) if goes_on(one)]
        if not some:
            return self.answers.pop(its[0])
        _, done = next(merge_steps(((request, one),) for one in some))
        delivered = its[: done.steps if isinstance(done, Decoded) else len(some)]
        self.answers = [answer for at, answer in enumerate(self.answers) if at not in delivered]
        return request, done

    def enter(self) -> None:
        launch = self.entering.pop(0)
        (self.device.prompt_lane if launch.lane == PROMPTS else self.device.lane).append(launch)

    def load(self) -> None:
        effect_request = self.loading.pop(self.rng.randrange(len(self.loading)))
        found = (
            self.store.find(effect_request.request, effect_request.effect)
            if isinstance(effect_request.effect, FindPrefix)
            else self.store.load(effect_request)
        )
        if isinstance(found, CheckedTransfer):
            self.device.lane.append(found)
        else:
            self.answers.append((effect_request.request, found))

    def takeable(self) -> list[EffectRequest]:
        """The snapshot whose turn it is, if it may be copied now: the saver takes one after the other."""
        return [effect_request for effect_request in self.device.taking[:1] if self.may_copy[effect_request.request]]

    def elapse(self) -> None:
        self.happen(ForEngine(self.timers.pop(self.rng.randrange(len(self.timers)))))

    def take(self) -> None:
        (effect_request,) = self.takeable()
        self.device.taking.remove(effect_request)
        del self.may_copy[effect_request.request]
        self.answers.append((effect_request.request, self.device.save(effect_request)))

    def work(self) -> None:
        self.answers += self.device.step()

    def work_prompt_lane(self) -> None:
        self.answers += self.device.step_prompt_lane()

    def feed(self, request: RequestId, event: Event) -> None:
        self.happen(ForRequest(request, event))

    def happen(self, happened: Happened) -> None:
        self.world, outs = advance(self.world, happened)
        self.history.append((happened, outs))
        check_world(self.world)
        for out in outs:
            self.carry_out(out)

    def carry_out(self, out: Output) -> None:
        match out:
            case Launch(effect_requests, lane, joins):
                assert joins or not self.launched.get(lane), "two launches at once"
                self.launched[lane] = self.launched.get(lane, set()) | {
                    effect_request.request for effect_request in effect_requests
                }
                self.note_checkpoints(effect_requests)
                self.entering.append(out)
            case EffectRequest(request, OpenSlot() as opening):
                assert not any(request in members for members in self.launched.values())
                assert not (opening.keep and opening.source in self.lost), "a slot that was lost is trusted"
                self.check_whose(opening, self.clients[request].job.salt)
                self.lost.discard(opening.slot)
                self.clients[request].served = opening.prompt
                self.device.lane.append(out)
            case EffectRequest(request, KeepFrozen(kept)):
                assert [name for name, _ in kept] == [
                    part.name for part in find_aged_messages(self.clients[request].job)
                ]
            case EffectRequest(_, ReleasePrefix() as release):
                self.store.release(release)
            case EffectRequest(request, ReportProgress() | EmitTokens() | CloseStream() as said):
                self.clients[request].hear(said)
            case EffectRequest(request, Abandon()):
                self.abandon(request)
            case EffectRequest(request, SaveSnapshot()):
                self.device.lane.append(out)
                self.may_copy[request] = False
            case EffectRequest(request, StopLaunch()):
                self.stop_launch(request)
            case EffectRequest() if is_of_pace(out):
                self.pace(out)
            case EffectRequest():
                assert out.effect.outcomes
                self.loading.append(out)

    def note_checkpoints(self, effect_requests: tuple[EffectRequest, ...]) -> None:
        """Note whose states the device will keep after the prefills of a launch."""
        for one in effect_requests:
            if isinstance(one.effect, RunPrefill) and one.effect.device_checkpoint is not None:
                self.checkpoints[one.effect.device_checkpoint] = self.clients[one.request].job.salt

    def pace(self, out: EffectRequest) -> None:
        """Take what the core says of the pace of background work, which no outcome answers."""
        match out:
            case EffectRequest(request, PaceSnapshot(may_copy)):
                self.may_copy |= {request: may_copy} if request in self.may_copy else {}
            case EffectRequest(_, PaceSteps(evenly, interval_ns) as pace):
                assert pace != self.pace_of_steps, "steps have that pace already"
                assert PROMPTS in self.world.lanes
                assert interval_ns <= (self.settings.latency_target_ns if evenly else 0)
                self.pace_of_steps = pace
            case EffectRequest(_, PaceMemory(gently)):
                assert self.settings.store
                assert gently == bool(self.world.requests)
            case EffectRequest(_, TrimMemory()):
                pass
            case EffectRequest(_, StartTimer(name, number)):
                timers = self.timers if name.startswith("snapshot") else self.trim_timers
                timers.append(TimerElapsed(name, number))

    def check_whose(self, opening: OpenSlot, salt: str) -> None:
        """Assert that the request continues only from rows and states of its own salt."""
        assert opening.salt == salt, "its rows would be kept under another salt"
        assert not opening.keep or self.salts[opening.source] == salt, "rows of another salt"
        assert opening.device_checkpoint is None or self.checkpoints[opening.device_checkpoint] == salt, (
            "a state of another salt"
        )
        self.salts[opening.slot] = salt

    def abandon(self, request: RequestId) -> None:
        """A flag for what is in flight, on each lane, and for nothing that is asked later."""
        if request in self.flying():
            self.device.abandoned.add(request)
        moving = [one.effect_request for one in self.device.lane if isinstance(one, CheckedTransfer)]
        if request in {effect_request.request for effect_request in (*self.loading, *moving)}:
            self.store.abandoned.add(request)

    def stop_launch(self, request: RequestId) -> None:
        assert any(request in self.launched.get(lane, ()) for lane in (MAIN, PROMPTS)), (
            "no launch runs that could be stopped"
        )
        if request in self.flying():
            self.device.stopped.add(request)

    def flying(self) -> set[RequestId]:
        """Members of the launches that the device is at."""
        launched = set[RequestId]().union(*self.launched.values())
        return launched - {whose for whose, one in self.answers if ends(one)}

    def check_the_end(self) -> None:
        world, device = self.world, self.device
        assert not world.requests, "a request outlived its end"
        assert not self.pace_of_steps.evenly, "steps are held back for no prompt"
        assert not world.slots.waiting
        assert all(lane.waiting == lane.running == () for lane in world.lanes.values())
        assert not self.store.leases, "a lease was never released"
        for name, model in world.models.items():
            assert not model.leases
            assert device.weights[name] == model.location
            idle = IDLE_LOCATION[get_action_after_use(self.settings.residency, name)]
            assert self.failures or device.weights[name] == idle, f"the {name} was never sent away"
        for slot, real in zip(world.slots.slots, device.slots, strict=True):
            rows = len(slot.tokens)
            assert slot.holder is None
            assert not (real.spoiled and rows), "a slot is trusted that broke"
            assert real.broken or real.rows[:rows] == rows_of(slot.tokens), "a slot does not have what it is said to"
            assert real.broken or not slot.state_position or slot.state_position == device.live(real), (
                "a slot has its state elsewhere"
            )
        for place, tokens in zip(world.slots.checkpoints, device.checkpoints, strict=True):
            kept = world.slots.slots[place.slot]
            assert tokens == kept.tokens[: place.at] or not place.at, "a place has another state than it is said to"
        for client in self.clients.values():
            client.check(self.settings, failures=self.failures > 0 or self.losses > 0)
        for request, tokens in self.store.asked:
            self.clients[request].check_kept(self.settings, tokens, self.store.shared.get(request, 0))

    def replay(self) -> None:
        """Fold what happened again: the same effect requests at every step, and the same world at the end."""
        world = make_world(self.settings)
        for happened, outs in self.history:
            world, again = advance(world, happened)
            assert again == outs, "a history does not replay"
        assert world == self.world
