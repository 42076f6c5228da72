"""Thousands of random schedules. Whatever the order of events, failures and cancellations, no request is lost and no
answer changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from attrs import evolve

import states.invariants
import states.pages
import states.slot_admission
import states.world
from effects.all import EffectRequest, Launch
from effects.compression import Compression
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId, Tokens
from effects.job import Job, Sampling
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored
from effects.stream import CloseStream, EmitTokens, StopLaunch
from states import residency
from states.events import Cancelled, ForRequest, Submitted
from states.kept_rows import ResidentRows
from states.machine import Table, Transition
from states.policy import Decision
from states.rates import Rates
from states.request_states import (
    Draining,
    Prompt,
    Recovering,
    ReleasingState,
    RequestRemainder,
    Restoring,
    StateWithSlot,
    Waiting,
    Yielding,
    get_remainder,
)
from states.residency import Resolved
from states.settings import DecisionContext, Settings
from states.table import TABLE
from states.world import advance, make_world
from tests.pairs import one_in
from tests.schedules.device import Device
from tests.schedules.simulator import Simulator

ONE, TWO = RequestId(1), RequestId(2)
CHUNK = 30
# Seeds of `test_the_schedules_go_nearly_everywhere`: the first ones, and two that take the rows that are left then.
COVERED, RARE = 300, (398, 745)


def chunks(usual: int, most: int, start: int = 0, step: int = CHUNK) -> list[Any]:
    """Return the first seed of each chunk from `start` up to `most`. Those from `usual` on are marked as long."""
    later = (pytest.param(first, marks=pytest.mark.long) for first in range(usual, most, step))
    return [*range(start, usual, step), *later]


@pytest.mark.parametrize(
    "first",
    [*chunks(COVERED + 2 * CHUNK, 10_000, start=COVERED), *chunks(0, COVERED)],
    ids=lambda first: f"from {first}",
)
def test_no_schedule_breaks_a_promise_and_every_history_replays(first: int) -> None:
    """The first schedules are played by `test_the_schedules_go_nearly_everywhere`, so here they are long."""
    for seed in range(first, first + CHUNK):
        assert not play(seed).world.requests


@pytest.mark.parametrize("seed", [5615, 9968])
def test_a_prompt_that_is_looked_for_again_goes_on_from_a_cache_position(seed: int) -> None:
    """A prompt is searched for again. Its front was computed together with decode steps, up to the middle of a block.
    Then the restore behind it failed, and after that the drafter did.
    """
    assert not play(seed).world.requests


def play(seed: int, make: Callable[[int], Simulator] = Simulator, *, replay: bool = True) -> Simulator:
    try:
        simulator = make(seed)
        simulator.run()
        if replay:
            simulator.replay()
    except Exception as error:
        error.add_note(f"seed {seed}: {make.__name__}({seed}).run() shows it again")
        raise
    return simulator


def test_the_schedules_go_nearly_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row, and six arms in seven, are taken in some hundred schedules, none of which breaks a promise."""
    taken = set()
    real = states.world.step

    def noted(rows: Table, state: object, event: object, known: object) -> Any:
        then = real(rows, state, event, known)
        taken.add((type(state), type(event), (type(then.state), *map(type, then.effects))))
        return then

    monkeypatch.setattr(states.world, "step", noted)
    for seed in (*range(COVERED), *RARE):
        assert not play(seed, replay=False).world.requests
    arms = {(row.state, row.event, arm) for row in TABLE.values() for arm in row.arms}
    assert taken <= arms
    # A model that is not sent away for a request that lost its slot, and one whose client leaves in that moment.
    rare = {(Yielding, DeviceFailed), (Yielding, Cancelled)}
    assert {pair[:2] for pair in taken} >= TABLE.keys() - rare
    assert len(taken) > 0.85 * len(arms)


def make_crowded(seed: int, settings: Settings, jobs: list[Job]) -> Simulator:
    """Return a schedule in which a request comes at every other chance."""
    simulator = Simulator(seed, settings, jobs)
    simulator.arrivals = 0.5
    return simulator


def iterate_outputs(simulator: Simulator) -> Iterator[Any]:
    """Yield what the core has asked for in a schedule: launches and effects."""
    return (out for _, outs in simulator.history for out in outs)


def make_with_spare_slots(seed: int) -> Simulator:
    """Return a schedule with more requests than are served at once, whose rows are saved, and with spare slots."""
    drawn = Simulator(seed)
    return make_crowded(seed, evolve(drawn.settings, slots=4, spare_slots=2, store=True, max_queue=20), drawn.jobs)


def short_of_pages(seed: int) -> Simulator:
    """Return a schedule with more requests at once than there are pages for, and with long answers."""
    drawn = Simulator(seed)
    settings = evolve(drawn.settings, slots=6, pages=20, page=4, max_queue=20)
    return make_crowded(seed, settings, [evolve(job, max_tokens=3 * job.max_tokens) for job in drawn.jobs])


@pytest.mark.parametrize("first", chunks(CHUNK, 300))
def test_nobody_is_lost_and_no_answer_changes_where_pages_are_short(first: int) -> None:
    for seed in range(first, first + CHUNK):
        assert not play(seed, short_of_pages).world.requests


@pytest.mark.parametrize("first", chunks(CHUNK, 500))
def test_spare_slots_change_no_answer_and_no_more_requests_are_served_at_once(first: int) -> None:
    most = 0
    for seed in range(first, first + CHUNK):
        simulator = play(seed, make_with_spare_slots)
        assert not simulator.world.requests
        world = make_world(simulator.settings)
        for happened, _ in simulator.history:
            world, _ = advance(world, happened)
            states_held = [world.requests[slot.holder] for slot in world.slots.slots if slot.holder is not None]
            assert sum(not isinstance(state, ReleasingState) for state in states_held) <= 2
            most = max(most, len(states_held))
    assert most > 2, "no spare slot was ever taken"


def with_pages_ahead(seed: int) -> Simulator:
    """Return a schedule with so many pages that answers have some ahead."""
    drawn = Simulator(seed)
    settings = evolve(drawn.settings, pages=64 * drawn.settings.slots, page=4)
    return make_crowded(seed, settings, [evolve(job, max_tokens=3 * job.max_tokens) for job in drawn.jobs])


@pytest.mark.parametrize("first", chunks(50, 300))
def test_answers_that_have_pages_ahead_stay_as_they_are(first: int) -> None:
    ahead = 0
    for seed in range(first, first + CHUNK):
        simulator = play(seed, with_pages_ahead)
        assert not simulator.world.requests
        launches = (out for out in iterate_outputs(simulator) if isinstance(out, Launch))
        effects = (one.effect for launch in launches for one in launch.effect_requests)
        ahead += sum(isinstance(one, RunDecode) and not one.propose and len(one.pages) > 1 for one in effects)
    assert ahead


def going_along(seed: int) -> Simulator:
    """Return a schedule in which several prompts go along with the steps of one launch."""
    drawn, rng = Simulator(seed), random.Random(seed)
    how: dict[str, Any] = {"max_copied": rng.choice((0, 0, 5)), "mixed_rows": rng.choice((8, 16))}
    how |= {"stateful": False, "state_checkpoints": 0, "max_proposals": 0, "max_branch": 0, "prompt_lane_min_rows": 0}
    how |= {"slots": rng.randint(3, 6), "batch_rows": 8, "chunk": 16, "chunks_per_prefill": rng.choice((3, 4))}
    settings = evolve(drawn.settings, **how, mixed_launches=True, pages=drawn.settings.pages and 60)
    return make_crowded(seed, settings, drawn.jobs)


@pytest.mark.parametrize("first", chunks(CHUNK, 1000))
def test_prompts_that_go_along_together_lose_nobody_and_change_no_answer(first: int) -> None:
    together = 0
    for seed in range(first, first + CHUNK):
        simulator = play(seed, going_along)
        assert not simulator.world.requests
        launches = (out for out in iterate_outputs(simulator) if isinstance(out, Launch))
        prompts = ([one for one in launch.effect_requests if is_along(one)] for launch in launches)
        together += sum(len(each) > 1 for each in prompts)
    assert together > CHUNK // 10


def is_along(effect_request: EffectRequest) -> bool:
    return isinstance(effect_request.effect, RunPrefill) and effect_request.effect.forward_rows > 0


def reading(seed: int) -> Simulator:
    """Return a schedule of prompts of many chunks, with a lane of their own, and with a store that may have them."""
    drawn, rng = Simulator(seed), random.Random(seed)
    chunk = drawn.settings.block_size * rng.choice((2, 4))
    least_rows = rng.choice([rows for rows in (1, 2, 3, 5) if rows < chunk])
    how: dict[str, Any] = {
        "chunk": chunk,
        "prompt_lane_min_rows": least_rows,
        "chunks_per_prefill": rng.choice((2, 3, 8)),
        "store": True,
    }
    settings = evolve(drawn.settings, stateful=False, max_proposals=0, tree=0, **how)
    jobs = [
        evolve(job, prompt=(job.prompt * 3)[: rng.randint(20, 60)], max_tokens=min(job.max_tokens, 9))
        if job.compression.mode == "off" and not job.compression.parts
        else job
        for job in drawn.jobs
    ]
    return make_crowded(seed, settings, jobs)


@pytest.mark.parametrize("first", chunks(CHUNK, 400))
def test_prompts_of_many_chunks_give_way_to_each_other_and_nobody_is_lost(first: int) -> None:
    """No launch is asked to stop twice."""
    halts = 0
    for seed in range(first, first + CHUNK):
        simulator, stopped = play(seed, reading), set[RequestId]()
        assert not simulator.world.requests
        for out in iterate_outputs(simulator):
            if isinstance(out, Launch):
                stopped -= {effect_request.request for effect_request in out.effect_requests}
            elif isinstance(out.effect, StopLaunch):
                assert out.request not in stopped
                stopped.add(out.request)
                halts += 1
    assert halts > CHUNK // 10


def beginning_alike(seed: int) -> Simulator:
    """Return a schedule of prompts with common heads, for a model with positional state on a device that runs ahead."""
    drawn, rng = Simulator(seed), random.Random(seed)
    block = rng.choice((2, 4))
    how: dict[str, Any] = {
        "block_size": block,
        "chunk": block * rng.choice((1, 2, 4)),
        "mixed_rows": rng.choice((8, 16)),
    }
    how |= {"slots": rng.randint(3, 6), "batch_rows": 8, "chunks_per_prefill": 8, "max_queue": 20}
    how |= {
        "stateful": True,
        "commits_per_segment": True,
        "state_checkpoints": rng.choice((2, 5)),
        "keep_decoded": True,
    }
    how |= {
        "max_proposals": 0,
        "max_branch": 0,
        "prompt_lane_min_rows": 0,
        "shares_pages": False,
        "scorer_max_tokens": 0,
    }
    settings = evolve(drawn.settings, **how, mixed_launches=True, pages=drawn.settings.pages and 60, rates=Rates())
    heads = [tuple(rng.randint(1, 10) for _ in range(60)) for _ in range(2)]
    jobs = list[Job]()
    for job in drawn.jobs:
        prompt = (*rng.choice(heads)[: rng.randint(4, 60)], *(rng.randint(1, 10) for _ in range(rng.randint(1, 9))))
        tokens = rng.randint(1, 9)
        jobs.append(evolve(job, prompt=prompt, boundaries=(), compression=Compression("off"), max_tokens=tokens))
    simulator = Simulator(seed, settings, jobs)
    simulator.arrivals = 0.8
    return simulator


@pytest.mark.parametrize("first", chunks(CHUNK, 800))
def test_prompts_that_begin_alike_share_heads_with_their_states_and_nobody_is_lost(first: int) -> None:
    followed = 0
    together = 0
    for seed in range(first, first + CHUNK):
        simulator = play(seed, beginning_alike)
        assert not simulator.world.requests
        for out in (out for _, outs in simulator.history for out in outs):
            if isinstance(out, Launch):
                together += sum(map(is_along, out.effect_requests)) > 1
            elif isinstance(out.effect, CloseStream):
                followed += out.effect.report.followed_tokens > 0
    assert followed > CHUNK // 4
    assert together > CHUNK // 10


def run_all(simulators: Iterable[Simulator]) -> None:
    for simulator in simulators:
        simulator.run()


def given_while_there_are_any(running: Any, total: int) -> bool:
    return len({page for held, _ in running for page in held}) <= total


def test_pages_that_are_given_while_there_are_any_lock_requests_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.pages, "can_all_finish", given_while_there_are_any)
    monkeypatch.setattr(states.invariants, "can_all_finish", given_while_there_are_any)
    with pytest.raises(AssertionError, match="outlived its end"):
        run_all(short_of_pages(seed) for seed in range(200))


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 40))])
def test_an_answer_in_a_crowd_is_the_answer_alone(seed: int) -> None:
    """The same job, alone in a house with other settings and another schedule."""
    crowd = play(seed, replay=False)
    for client in crowd.clients.values():
        served = evolve(client.job, prompt=client.served, compression=Compression())
        alone = Simulator(seed + 1, Settings(max_context=80, chunk=4, block_size=2), [served], calm=True)
        alone.run()
        (only,) = alone.clients.values()
        assert only.tokens[: len(client.tokens)] == client.tokens


@pytest.mark.parametrize("first", chunks(50, 200, step=50))
def test_a_request_whose_slot_is_lost_once_is_answered_as_if_nothing_had_been_and_the_second_time_it_is_told(
    first: int,
) -> None:
    ends = dict[tuple[int, str], int]()
    for seed in range(first, first + 50):
        drawn = Simulator(seed)
        simulator = Simulator(seed, evolve(drawn.settings, slots=1), drawn.jobs, calm=True)
        simulator.losses = 0.03
        simulator.run()
        simulator.replay()
        for client in simulator.clients.values():
            assert client.closing is not None
            end = min(client.losses, 2), client.closing.finish
            ends[end] = ends.get(end, 0) + 1
    assert {finish for losses, finish in ends if losses < 2} <= {"length", "stop", "queue_full"}
    assert ends.get((1, "length"), 0) + ends.get((1, "stop"), 0) > 10
    assert ends.get((2, "lost"), 0) > 2


@pytest.mark.parametrize("slots", [2, 3])
def test_titles_between_the_turns_of_a_conversation_leave_it_on_the_device(slots: int) -> None:
    """Three at once, of which all have a beginning in common, before each turn."""
    settings = Settings(slots=slots, max_context=2000, chunk=8, block_size=4, max_queue=8)
    simulator = Simulator(1, settings, [], calm=True)
    prompt, number = tuple(range(1, 42)), 0
    for turn in range(1, 11):
        titles = [Job((*range(3, 40), turn, 100 + which), 3, opens=True) for which in range(3)]
        for jobs in (titles, [Job(prompt, 5)]):
            for job in jobs:
                simulator.submit(RequestId(number), job)
                number += 1
            while simulator.busy():
                simulator.rng.choice(simulator.possible())()
        said = simulator.clients[RequestId(number - 1)]
        assert said.closing is not None
        kept = len(prompt) - said.closing.report.restored_tokens
        assert kept < settings.block_size + 20 or turn == 1, f"turn {turn} was computed again"
        prompt = (*prompt, *said.tokens, *range(turn, turn + 13))
    simulator.check_the_end()
    simulator.replay()


class NoRoom(Device):
    """The draft never comes back."""

    def perform(self, effect_request: EffectRequest) -> Any:
        if isinstance(effect_request.effect, LoadModel):
            return DeviceFailed("out_of_memory", "no room for the draft")
        return super().perform(effect_request)


SPECULATING = Settings(slots=2, max_context=80, chunk=4, block_size=2, max_proposals=7)
PARKED = evolve(SPECULATING, residency=Resolved("request-scoped", "park"))


@one_in(2, "seed")
@pytest.mark.parametrize("seed", range(20))
def test_an_answer_is_the_same_with_a_draft_without_one_and_where_it_cannot_be_had(seed: int) -> None:
    jobs = Simulator(seed).jobs
    plain = [evolve(job, speculate=False) for job in jobs]
    heard, reasons = list[list[Any]](), list[set[str]]()
    for settings, some, device in (
        (evolve(SPECULATING, max_proposals=0), jobs, Device),
        (SPECULATING, jobs, Device),
        (SPECULATING, plain, Device),
        (PARKED, jobs, Device),
        (evolve(PARKED, residency=Resolved("request-scoped", "release")), jobs, Device),
        (PARKED, jobs, NoRoom),
    ):
        simulator = Simulator(seed, settings, some, calm=True)
        simulator.device = device(settings, simulator.rng, simulator.store, 0)
        simulator.failures = 1.0 if device is NoRoom else 0.0  # of the final check: the draft need not be where it was
        simulator.run()
        heard.append([client.tokens for client in simulator.clients.values()])
        reasons.append({client.closing.report.speculation for client in simulator.clients.values() if client.closing})
    assert all(tokens == heard[0] for tokens in heard)
    assert reasons[0] == {"no_draft"}
    assert reasons[2] == {"declined"}
    assert reasons[5] <= {"unpark_out_of_memory", "one_token", "declined"}


# Mutants: bugs that only a schedule shows, and that the simulator sees them.


def changed(pair: tuple[type, type], transition: Any) -> Table:
    arms = {(target, *effect_requests) for row in TABLE.values() for target, *effect_requests in row.arms}
    return {**TABLE, pair: evolve(TABLE[pair], transition=transition, arms=tuple(arms))}


def trusting(state: Restoring, event: BlocksRestored, known: DecisionContext) -> Any:
    """Believes that all rows came which were asked for."""
    return TABLE[Restoring, BlocksRestored].transition(
        state, evolve(event, start=state.load_start, stop=state.stop), known
    )


def generous(state: Draining, event: Decoded, known: DecisionContext) -> Any:
    """Counts a row for every token that a cancelled decode step picked, though the client saw none of them."""
    then = TABLE[Draining, Decoded].transition(state, event, known)
    left = then.state.remainder
    more = evolve(left, slot_lease=evolve(left.slot_lease, valid_rows=left.slot_lease.valid_rows + 1))
    return Transition(evolve(then.state, remainder=more), *then.effects)


def early(slot: Any, requests: Any, _: Settings) -> Any:
    """Offers the rows of a busy slot before they are acknowledged."""
    state = requests.get(slot.holder)
    if not isinstance(state, StateWithSlot):
        return ResidentRows(slot.packed_tokens, len(slot.tokens))
    prompt = get_remainder(state).prompt
    return ResidentRows(prompt.packed_tokens, len(prompt.tokens))


def alone(models: Any, effect_request: EffectRequest, settings: Settings) -> Any:
    """Parks the draft although others need it."""
    if isinstance(effect_request.effect, UnloadModel):
        return models, None
    return residency_at_once(models, effect_request, settings)


residency_at_once = residency.answer_without_move


def caught(limit: int = 400) -> str:
    """The first complaint about a mutant."""
    for seed in range(limit):
        try:
            play(seed, replay=False)
        except AssertionError as error:
            return repr(error)
    return ""


def test_rows_that_never_came_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.world, "TABLE", changed((Restoring, BlocksRestored), trusting))
    assert "rows that are not there" in caught()


def test_rows_of_tokens_that_nobody_saw_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.world, "TABLE", changed((Draining, Decoded), generous))
    assert caught()


def test_copying_rows_before_they_are_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.slot_admission, "get_resident_rows", early)
    assert "a slot is opened on rows that are not there" in caught()


def test_a_draft_parked_under_somebody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "answer_without_move", alone)
    assert caught()


def test_a_compression_that_the_client_declined_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(settings: Settings, prompt: Prompt) -> Decision:
        return Decision(settings.scorer_max_tokens > 0 and not prompt.compression_tried, "mutant")

    monkeypatch.setattr("states.policy.decide_shortening", allowed)
    assert caught()


def test_keeping_more_than_the_scope_allows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("states.scope.find_scope_boundary", lambda prompt, _: (len(prompt.tokens), "mutant"))
    assert "kept" in caught()


def test_a_checkpoint_beyond_the_scope_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("states.scope.list_checkpoint_positions", lambda _, __, prompt: iter((prompt.prefill_rows,)))
    assert caught()


def test_state_that_is_believed_to_be_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_half(_: object, left: RequestRemainder) -> Tokens:
        return left.valid_tokens[: left.slot_lease.valid_rows // 2]

    monkeypatch.setattr("states.slots.get_kept_sequence", keep_half)
    assert "state" in caught()


def test_a_prompt_that_is_compared_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("states.policy.count_prompts_to_compare", lambda _: 3)
    assert "a prompt is compared once" in caught()


def test_a_forgotten_lane_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("states.lane.record_outcome", lambda lane, *_, **__: lane)
    assert caught()


def test_a_prefill_that_does_not_wait_until_its_slot_is_open_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "are_slots_open", property(lambda _: True))
    why = caught()
    assert "rows that are not there" in why or "a slot that was opened for another request" in why


def test_rows_that_are_believed_after_a_loss_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("states.slots.forget_rows", lambda slots, _: slots)
    assert caught()


def test_a_loss_that_the_holder_never_hears_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("states.recover.forget_all_rows", lambda left: left)
    assert caught()


def test_an_answer_that_is_said_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    transition = TABLE[Recovering, Decoded].transition

    def forgetting(state: Recovering, event: Decoded, known: DecisionContext) -> Any:
        then = transition(state, event, known)
        if not isinstance(then.state, Waiting):
            return then
        return Transition(Waiting(evolve(then.state.prompt, heard_tokens=())))

    monkeypatch.setattr(states.world, "TABLE", changed((Recovering, Decoded), forgetting))
    assert caught()


# What a schedule cannot show: that turns are fair.


def in_turn(prompts: list[int], settings: Settings) -> list[tuple[RequestId, ...]]:
    """The launches of a house where everybody comes at once and nothing fails, as lists of decode steps or chunks.
    Those who join a launch have a step of their own behind the one that it is at, together.
    """
    world, launches, todo = make_world(settings), list[tuple[RequestId, ...]](), list[Launch]()
    for number, length in enumerate(prompts):
        job = Job(tuple(range(number * 1000, number * 1000 + length)), 30, Sampling())
        world, outs = advance(world, ForRequest(RequestId(number), Submitted(job)))
        todo += [out for out in outs if isinstance(out, Launch)]
    while todo:
        launch = todo.pop(0)
        launches.append(tuple(effect_request.request for effect_request in launch.effect_requests))
        for effect_request in launch.effect_requests:
            done = (
                Decoded((5,))
                if isinstance(effect_request.effect, RunDecode)
                else PrefillAdvanced(effect_request.effect.stop)
            )
            assert isinstance(effect_request.effect, RunPrefill | RunDecode)
            world, outs = advance(world, ForRequest(effect_request.request, done))
            for out in outs:
                if isinstance(out, Launch) and out.joins and todo and todo[-1].joins:
                    todo[-1] = evolve(todo[-1], effect_requests=(*todo[-1].effect_requests, *out.effect_requests))
                elif isinstance(out, Launch):
                    todo.append(out)
    return launches


def test_a_long_prefill_delays_a_decoding_neighbour_by_one_chunk() -> None:
    launches = in_turn([1, 400], Settings(chunk=4, block_size=4))
    first = launches.index((RequestId(0),))
    assert launches[first : first + 58] == [(RequestId(0),), (RequestId(1),)] * 29


def test_scoring_delays_a_decoding_neighbour_by_one_chunk() -> None:
    """A prompt that is compressed takes turns like one that is prefilled."""
    settings = Settings(chunk=4, block_size=4, scorer_max_tokens=99)
    world, outs = advance(make_world(settings), ForRequest(ONE, Submitted(Job((1,), 30))))
    world, more = advance(
        world, ForRequest(TWO, Submitted(Job(tuple(range(40)), 30, compression=Compression("always"))))
    )
    kinds, todo = list[type](), [out for out in (*outs, *more) if isinstance(out, Launch)]
    while len(kinds) < 21:
        (effect_request,) = todo.pop(0).effect_requests
        kinds.append(type(effect_request.effect))
        match effect_request.effect:
            case LoadModel(name):
                done: Any = ModelLoaded(name=name)
            case CompressPrompt(start):
                done = PromptScored(start + 4) if start < 36 else PromptCompressed((1, 2), ((0, 2),))
            case _:
                done = Decoded((5,))
        world, outs = advance(world, ForRequest(effect_request.request, done))
        todo += [out for out in outs if isinstance(out, Launch)]
    assert kinds == [RunDecode, LoadModel, RunDecode, *(CompressPrompt, RunDecode) * 9]


def test_of_two_long_prefills_the_one_that_was_begun_first_gets_most_of_the_turns_that_decoding_leaves() -> None:
    launches = in_turn([1, 200, 200], Settings(slots=3, chunk=4, block_size=4))
    turns = launches[launches.index((RequestId(0),)) + 1 :]
    assert turns[:18:2] == [(RequestId(n),) for n in (1, 1, 1, 2, 1, 1, 1, 2, 1)]
    assert turns[1:18:2] == [(RequestId(0),)] * 9


def test_a_short_prompt_is_read_before_the_rest_of_a_long_one_that_came_first() -> None:
    launches = in_turn([200, 9], Settings(chunk=4, block_size=4))
    assert launches[:4] == [(RequestId(0),), (RequestId(1),), (RequestId(1),), (RequestId(1),)]


@pytest.mark.parametrize("mixed_rows", [8, 16])
def test_in_mixed_forwards_nobody_who_decodes_waits_for_a_prompt(mixed_rows: int) -> None:
    launches = in_turn([1, 400, 60], Settings(slots=3, chunk=32, block_size=4, mixed_rows=mixed_rows))
    first = launches.index((RequestId(0), RequestId(2)))
    assert all(RequestId(0) in launch and len(launch) > 1 for launch in launches[first : first + 29])


def test_requests_that_decode_go_together() -> None:
    launches = in_turn([1, 1, 1], Settings(slots=3))
    assert max(map(len, launches)) == 3
    assert len(launches) < 36


def test_a_batch_that_is_too_small_for_all_serves_them_in_turn() -> None:
    launches = in_turn([1, 1, 1], Settings(slots=3, batch_rows=2))
    counts = [sum(RequestId(n) in launch for launch in launches[:30]) for n in range(3)]
    assert max(counts) - min(counts) <= 1


def test_what_nobody_awaits_is_refused() -> None:
    world, _ = advance(make_world(Settings()), ForRequest(RequestId(0), Submitted(Job((1, 2, 3), 4))))
    world, _ = advance(world, ForRequest(RequestId(0), PrefillAdvanced(2)))
    for unasked in (PrefillAdvanced(2), ModelUnloaded()):
        with pytest.raises(states.world.IllegalEvent):
            advance(world, ForRequest(RequestId(0), unasked))


def test_every_token_is_streamed_once() -> None:
    simulator = play(7)
    for request, client in simulator.clients.items():
        said = [
            out.effect.tokens
            for _, outs in simulator.history
            for out in outs
            if isinstance(out, EffectRequest) and out.request == request and isinstance(out.effect, EmitTokens)
        ]
        assert sum(said, ()) == client.tokens
