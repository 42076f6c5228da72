"""A model checker in a page: it walks everything that one request can do.

It runs the real transitions on a prompt of four tokens, with every outcome that an executor may give. So no guard is
written a second time. A node is the state, the effects in flight, and what the request has yet to give back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, product
from typing import Any, TypeAlias

from attrs import evolve, field, frozen

from effects.all import Effect
from effects.compression import Compression, PromptPart
from effects.decode import Decoded, RunDecode
from effects.ids import CheckpointId, DeviceFailed, LeaseId, Side, SlotId, StoreFailed
from effects.job import Job, freezes_messages
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored, RestoreBlocks
from effects.scope import Scope
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import CloseStream, EmitTokens, ReportProgress
from states.events import Admitted, Cancelled, Rejected, SlotEmptied, Submitted
from states.machine import IllegalEvent, Table, step
from states.rates import Rates
from states.request_states import (
    Done,
    Draining,
    New,
    Parking,
    Snapshotting,
    StateWithSlot,
    UnloadingScorer,
    Waiting,
    get_remainder,
)
from states.residency import Resolved, get_action_after_use
from states.settings import DecisionContext, Settings

STOP = 0
JOB = Job(prompt=(1, 2, 3, 4), max_tokens=2, stop_tokens=(STOP,), compression=Compression("auto", 2, 500))
EAGER = evolve(JOB, compression=Compression("always", keep=500))
AGED = PromptPart("user", 1, 3, keep=500, name="aged")
FREEZING = evolve(JOB, compression=Compression("always", keep=500, parts=(AGED,), continues=True, freeze=True))
JOBS = (
    JOB,
    *(evolve(JOB, scope=scope, boundaries=(1, 3)) for scope in (Scope("off"), Scope("fixed", 3), Scope("auto", 2))),
)
SERVED = (1, 5)
RATES = Rates(prefill=(10,), loads={"disk": 10})  # loading is as fast as computing
BLOCKS = tuple(
    Settings(
        block_size=block_size,
        chunk=block_size,
        store=store,
        max_proposals=block,
        scorer_max_tokens=drafter,
        keep_decoded=keep_decoded,
        residency=Resolved("auto", "keep" if block_size == 1 else "release"),
    )
    for block_size, store, block, drafter, keep_decoded in product((1, 2), (False, True), (0, 1), (0, 9), (False, True))
)
# Every combination of any four of these five options, which is half of all combinations.
HALF = tuple(
    one
    for one in BLOCKS
    if (one.block_size + one.store + one.max_proposals + (one.scorer_max_tokens > 0) + one.keep_decoded) % 2 == 1
)
STATEFUL = tuple(
    Settings(
        block_size=1,
        chunk=2,
        store=True,
        stateful=True,
        state_tokens=1,
        shared_checkpoint_limit=2,
        checkpoint_interval=interval,
        keep_decoded=keep_decoded,
        state_checkpoints=checkpoint_count,
    )
    for interval, keep_decoded, checkpoint_count in ((0, True, 2), (1, True, 0), (1, False, 1))
)
TIGHT = evolve(BLOCKS[0], scorer_max_tokens=9, max_context=5)  # the prompt fits once it is compressed
FITTING = evolve(TIGHT, max_context=6)  # and here as it is, too
SPANNING = evolve(BLOCKS[2], chunks_per_prefill=2)  # a prefill of two chunks
# Those in which a slot may lose its rows, and how often. With a store, a prompt scorer and kept answers, jobs of
# several scopes have 31,000 nodes then, as many as all other combinations together: only the walk of all options has
# them.
MOST_LOSSES = {(True, 0, 9, False): 1, (True, 0, 9, True): 2, (False, 0, 9, True): 2, (False, 1, 0, True): 2}
LOSING = {
    one: MOST_LOSSES[kind]
    for one in BLOCKS
    if one.block_size == 1
    and (kind := (one.store, one.max_proposals, one.scorer_max_tokens, one.keep_decoded)) in MOST_LOSSES
} | {STATEFUL[0]: 2}
SETTINGS = (*HALF, TIGHT, FITTING, *STATEFUL, SPANNING)
ALL_SETTINGS = (*BLOCKS, TIGHT, FITTING, *STATEFUL, SPANNING)
BEHIND_THE_CLIENT = (Draining, Snapshotting, Parking, Done)
DEVICE_FAILURES = (DeviceFailed("out_of_memory", ""), DeviceFailed("broken", ""), DeviceFailed("abandoned", ""))

Arm: TypeAlias = tuple[type, ...]


@frozen(cache_hash=True)
class Node:
    known: DecisionContext = field(eq=id)  # one for each settings: a walk compares nodes by the hundred thousand
    state: Any
    flying: frozenset[Effect] = frozenset()
    lease: bool = False  # a hit in the store is held, and nothing in flight will let go of it
    draft: bool = False  # the draft or the drafter is leased, and nothing in flight will give it back
    lost: bool = False  # the slot's rows are gone, and it has not been opened since
    losses: int = 0  # how often: up to twice
    admitted: int = 0  # how often
    closed: bool = False


@frozen
class Walk:
    edges: dict[Node, set[Node]] = field(factory=dict)
    arms: set[tuple[type, type, Arm]] = field(factory=set)
    faults: set[str] = field(factory=set)


def outcomes(effect: Effect) -> Iterator[Any]:
    """Yield every kind of outcome, with every value that makes a difference."""
    match effect:
        case FindPrefix(prompt, beyond, prompts_to_compare):
            for shared in (0, 2, 4) if prompts_to_compare else (0,):
                yield PrefixMissed("diverged", shared)
                for length in range(beyond, len(prompt) + 1):
                    yield PrefixFound(LeaseId(1), length, "disk", shared)
            yield StoreFailed("io", "")
        case RestoreBlocks(_, _, start, stop):
            yield BlocksRestored(start, stop, 1)
            yield BlocksRestored(start + 1, stop, 1)
            yield BlocksRestored(start, stop - 1, 1)
            yield StoreFailed("io", "")
        case CompressPrompt(start):
            yield from scorings(start)
        case LoadModel(name):
            yield ModelLoaded(name=name)
        case RunPrefill(start=start, stop=stop):
            yield from map(PrefillAdvanced, range(max(start + 1, stop - 1), stop + 1))  # it may be given up before
            yield from (PrefillAdvanced(at, more=True) for at in range(start + 1, stop))
        case RunDecode(propose=propose):
            yield from (Decoded(tokens[: propose + 1], propose) for tokens in ((7, 8), (7, STOP), (STOP, 8), (7,)))
            yield from (Decoded((STOP,), propose, accepted=propose), Decoded((7,))) if propose else ()
            yield from alone(effect)
        case SaveSnapshot(_, tokens):
            yield from (SnapshotSaved(len(tokens), 1), StoreFailed("out_of_memory", ""), StoreFailed("broken", ""))
        case UnloadModel():
            yield ModelUnloaded()
    if effect.side is Side.DEVICE:
        yield from DEVICE_FAILURES


def alone(effect: RunDecode) -> Iterator[Decoded]:
    """Yield the outcomes of steps that run without asking: those that come on the way, and that of several steps at the
    end.
    """
    if effect.steps > 1:
        yield Decoded((7,), more=True)
        yield from (Decoded(tokens, steps=2, accepted=0) for tokens in ((7, 8), (7, STOP)))
    if effect.steps > 2:
        yield Decoded((7, 8), steps=2, accepted=0, more=True)


def scorings(start: int, *, apart: bool = False) -> Iterator[Any]:
    if start < 2:
        yield PromptScored(start + 2)
    elif apart:
        yield from (PromptCompressed((), ((1, 2),)), PromptCompressed((), ((1, 3),)))
    else:
        yield from (PromptCompressed(SERVED, ((0, 1),)), PromptCompressed(JOB.prompt, ((0, 4),)))


def checkpoints_of(effect: Effect) -> Iterator[Any]:
    """Yield the outcomes for a model with positional state: a lookup finds a checkpoint or nothing, and all of it
    loads, or nothing.
    """
    match effect:
        case FindPrefix(prompt, beyond, prompts_to_compare):
            for shared in (0, 2, 4) if prompts_to_compare else (0,):
                yield PrefixMissed("no_checkpoint:0", shared=shared)
                for last in range(beyond + 1, len(prompt)):
                    for checkpoints in ((last,), (beyond + 1, last)) if last > beyond + 1 else ((last,),):
                        yield PrefixFound(LeaseId(1), last, "disk", shared, checkpoints)
        case RestoreBlocks(_, _, start, stop):
            yield BlocksRestored(start, stop, 1)
            yield StoreFailed("lost", "")
    yield StoreFailed("io", "")


def list_events(node: Node) -> Iterator[tuple[Any, Effect | None]]:
    """Yield all events that can happen in a node, each with the effect that it answers."""
    settings = node.known.settings
    match node.state:
        case New():
            scoped = (
                settings.store and settings.block_size == 1 and not settings.max_proposals and settings.keep_decoded
            )
            others = (JOB, EAGER, FREEZING) if settings == FITTING else (JOB, FREEZING) if settings == TIGHT else (JOB,)
            jobs = JOBS if scoped else others
            yield from ((Submitted(job), None) for job in jobs)
            yield Rejected(3), None
            return
        case Waiting():
            for keep, source in product(range(0, len(JOB.prompt), settings.block_size), (0, 1)):
                for state in range(keep + 1) if settings.stateful else (0,):
                    for device_checkpoint in (
                        (None, CheckpointId(0)) if state and settings.state_checkpoints else (None,)
                    ):
                        yield Admitted(SlotId(0), SlotId(source), keep, state, device_checkpoint), None
    yield Cancelled("client_gone"), None
    if isinstance(node.state, StateWithSlot) and node.losses < LOSING.get(settings, 0):
        yield from ((SlotEmptied(), None),) if get_remainder(node.state).prompt.job == JOB else ()
    for effect in node.flying:
        if isinstance(effect, CompressPrompt) and freezes_messages(get_remainder(node.state).prompt.job):
            asked = chain(scorings(effect.start, apart=True), DEVICE_FAILURES)
            yield from ((outcome, effect) for outcome in asked)
            continue
        stateful = settings.stateful and isinstance(effect, FindPrefix | RestoreBlocks)
        yield from ((outcome, effect) for outcome in (checkpoints_of if stateful else outcomes)(effect))


def explore(rows: Table, all_settings: tuple[Settings, ...] = SETTINGS, until: str | None = None) -> Walk:
    """until: a fault, and nothing is looked for once it is found."""
    walk = Walk()
    for settings in all_settings:
        start = Node(DecisionContext(settings, RATES if settings.block_size == 1 else Rates()), New())
        todo, seen = deque([start]), {start: start}
        while todo and until not in walk.faults:
            node = todo.popleft()
            reached = walk.edges.setdefault(node, set())
            for event, answered in () if isinstance(node.state, Done) else list_events(node):
                target = follow(rows, walk, node, event, answered)
                if target is None or (target == node and answered is None):
                    continue  # nothing to follow, or an ignored cancellation
                if (same := seen.setdefault(target, target)) is target:
                    todo.append(target)
                reached.add(same)
    return walk


def follow(rows: Table, walk: Walk, node: Node, event: Any, answered: Effect | None) -> Node | None:
    where = f"{type(node.state).__name__}, {type(event).__name__}"
    try:
        then = step(rows, node.state, event, node.known)
    except IllegalEvent:
        walk.faults.add(f"{where}: no row")
        return None
    except AssertionError:
        walk.faults.add(f"{where}: not what the annotation says")
        return None
    walk.arms.add((type(node.state), type(event), (type(then.state), *map(type, then.effects))))
    after = Node(  # `evolve` would take a tenth of the walk
        known=node.known,
        state=strip_reports(then.state),
        flying=(node.flying - {answered}) | going_on(event, answered),
        lease=node.lease or isinstance(event, PrefixFound),
        draft=node.draft or isinstance(event, ModelLoaded),
        lost=node.lost or isinstance(event, SlotEmptied),
        losses=node.losses + isinstance(event, SlotEmptied),
        admitted=node.admitted + isinstance(event, Admitted),
        closed=node.closed,
    )
    for effect in then.effects:
        after, fault = apply_effect(after, effect)
        if fault:
            walk.faults.add(f"{where}: {fault}")
    walk.faults.update(f"{where}: {fault}" for fault in at_rest(after))
    return after


def going_on(event: Any, answered: Effect | None) -> frozenset[Effect]:
    """Return the effect that has answered and will answer again, with the steps or rows that are left of it."""
    if isinstance(answered, RunPrefill) and isinstance(event, PrefillAdvanced) and event.more:
        return frozenset({evolve(answered, start=event.stop)})
    if not (isinstance(answered, RunDecode) and isinstance(event, Decoded) and event.more):
        return frozenset()
    position, steps = answered.position + len(event.tokens), answered.steps - len(event.tokens)
    return frozenset({evolve(answered, position=position, token=event.tokens[-1], steps=steps)})


def strip_reports(state: Any) -> Any:
    """Return the state without what is only reported, such as the reason why a compression failed."""
    if isinstance(state, UnloadingScorer):
        return state
    remainder = getattr(state, "remainder", None)
    if remainder is not None:
        shown = strip_reports(remainder)
        return state if shown is remainder else evolve(state, remainder=shown)
    prompt = getattr(state, "prompt", None)
    if prompt is None or prompt.compression is None:
        return state
    return evolve(state, prompt=evolve(prompt, compression=None))


def apply_effect(node: Node, effect: Effect) -> tuple[Node, str | None]:
    """Return the node after an effect, and the fault of asking for it now, if any."""
    fault = None
    if effect.outcomes and any(other.side is effect.side for other in node.flying):
        fault = "two effects in flight on one lane"
    match effect:
        case ReleasePrefix() | RestoreBlocks():
            fault = None if node.lease else "uses a lease that it does not have"
            node = evolve(node, lease=False)
        case UnloadModel(name, keep):
            fault = fault if node.draft else "gives back a draft that it does not have"
            if keep == (get_action_after_use(node.known.settings.residency, name) == "release"):
                fault = "sends the draft where the policy does not"
            node = evolve(node, draft=False)
        case RunDecode(propose=propose) if propose and not node.draft:
            fault = "proposes without a draft"
        case OpenSlot():
            node = evolve(node, lost=False)
        case CloseStream():
            fault = "closes twice" if node.closed else None
            node = evolve(node, closed=True)
        case EmitTokens() | ReportProgress() if node.closed:
            fault = "speaks after the close"
    if effect.outcomes:
        node = evolve(node, flying=node.flying | {effect})
    return node, fault or misplaced(node, effect)


def misplaced(node: Node, effect: Effect) -> str | None:
    """Return the fault in the rows that an effect names, if any."""
    slot_lease = get_remainder(node.state).slot_lease if isinstance(node.state, StateWithSlot) else None
    match effect:
        case OpenSlot(keep=keep, state=state, device_checkpoint=device_checkpoint) if not state <= keep or (
            device_checkpoint is not None and not state
        ):
            return "goes on from a state of rows that are not there"
        case RestoreBlocks(start=start) if slot_lease and start > slot_lease.rows and not node.state.computing:
            return "loads rows behind some that are missing"
        case RunPrefill(start=start) | RunDecode(position=start) if slot_lease and start != slot_lease.valid_rows:
            return "computes other rows than the next ones"
        case RunPrefill() | RunDecode() if slot_lease and slot_lease.rows_ahead:
            return "believes rows that are overwritten"
    return None


def at_rest(node: Node) -> Iterator[str]:
    """Yield the faults of a node between two events."""
    if node.lease:
        yield "forgets a lease"
    if node.lost and isinstance(node.state, StateWithSlot) and get_remainder(node.state).slot_lease.valid_rows:
        yield "trusts a slot that was lost"
    if (
        isinstance(node.state, Done)
        and node.state.remainder
        and node.lost
        and node.state.remainder.slot_lease.valid_rows
    ):
        yield "leaves rows to a slot that was lost"
    if node.admitted > 2:
        yield "is looked up a third time"
    if node.closed != isinstance(node.state, BEHIND_THE_CLIENT):
        yield "the stream is not closed with the last work for the client"
    if isinstance(node.state, Done):
        if node.flying:
            yield "ends with something in flight"
        if node.draft:
            yield "ends with the draft"
    elif not node.flying and not isinstance(node.state, Waiting):
        yield "waits for nothing"


def endless(walk: Walk) -> list[Node]:
    """Nodes from which a life may never end. None: the graph has no cycle, and only the end has no way on."""
    ends: set[Node] = set()
    before: dict[Node, set[Node]] = {node: set() for node in walk.edges}
    left = dict[Node, int]()
    for node, targets in walk.edges.items():
        left[node] = len(targets)
        for target in targets:
            before[target].add(node)
    todo = deque(node for node, count in left.items() if count == 0 and isinstance(node.state, Done))
    while todo:
        node = todo.popleft()
        ends.add(node)
        for earlier in before[node]:
            left[earlier] -= 1
            if left[earlier] == 0:
                todo.append(earlier)
    return [node for node in walk.edges if node not in ends]
