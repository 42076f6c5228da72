"""Tests that a draft in another process proposes what one here does, and that no request fails if that process does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

import pytest
import torch
from attrs import define, field

from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.drafting import Drafting
from adapters.device.speculation.proposal_tree import chain
from adapters.device.speculation.proposer import DraftRequest
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.dflash.weights import describe_taps
from adapters.models.drafts.feature_projection import FeatureProjection
from adapters.models.kernels.step import Segment, Step
from adapters.remote.client.attach_remote_draft import RemoteDrafting
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.protocol.draft_messages import DraftStep, LoadDraft
from adapters.remote.protocol.messages import Nothing, Op
from adapters.remote.protocol.peer_expectation import DRAFT_DEADLINES
from adapters.remote.protocol.slot_messages import SlotCheckpoint
from adapters.sequence_layout import dtype_name
from adapters.transfer.copy_rows import RowMover
from effects.ids import RequestId
from effects.job import Sampling
from effects.ports import RowsLost
from tests.models.checkpoints import same_bits
from tests.models.draft_models import TARGET, aux_hidden_states_of, config_of, draft_of, proven_draft, random_tensors
from tests.pairs import one_in
from tests.remote.daemons import LIMIT, Fates, Mortal, RandomModel, Threads, peer_of

CONFIG, F32, SLOTS, CAPACITY, NODES = config_of(), torch.float32, 4, 1200, 20
BUCKETS = (4, 8, 16, 32, 64, 128, 256)
DIGESTS = ("weights of tests", "rows of tests")
ROWS = 100


@define(eq=False)
class DraftedModel(RandomModel):
    """The model side of a daemon that has a draft. digests: that it says."""

    digests: tuple[str, str] = DIGESTS

    def load_draft(self, asked: LoadDraft) -> ServedDraft:
        assert (asked.dtype, asked.slots, asked.capacity) == (dtype_name(F32), SLOTS, CAPACITY)
        return ServedDraft(draft_of(CONFIG), TARGET.vocab_size, asked.nodes, *self.digests)


@define(eq=False)
class Elsewhere:
    """A draft on threads, with whatever is to become of them, and what the world hears of it."""

    fates: Fates = field(factory=Fates)
    heard: list[bool] = field(factory=list)
    back: threading.Event = field(factory=threading.Event)
    dial: Threads = field(init=False)
    draft: RemoteDraft = field(init=False)
    drafting: RemoteDrafting = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dial = Threads(
            DraftedModel(TARGET), meddle=lambda channel: Mortal(channel.socket, doom=self.fates.doom), name="thread:1"
        )
        self.draft = made(peer_of(self.dial, DRAFT_DEADLINES))
        self.draft.peer.pause_s = 0
        self.draft.set_presence_listener(self.set_presence)
        self.drafting = RemoteDrafting(self.draft, BUCKETS)

    def set_presence(self, there: bool) -> None:
        self.heard.append(there)
        if there:
            self.back.set()


def made(peer: Peer) -> RemoteDraft:
    peer.connect()
    asked = LoadDraft("F32", 0, SLOTS, CAPACITY, BUCKETS, NODES, 64, False, LIMIT, (1 << 20, 1 << 20))
    kernels = proven_draft(CONFIG, F32, CAPACITY).copy_for_shard()
    projection = FeatureProjection(describe_taps(CONFIG), random_tensors(CONFIG), kernels, torch.device("cpu"), F32)
    return RemoteDraft(peer, asked, CONFIG, DIGESTS, projection)


@pytest.fixture(scope="module")
def here() -> DFlashDraft:
    return draft_of(CONFIG)


@pytest.fixture
def apart() -> Iterator[Elsewhere]:
    found = Elsewhere()
    yield found
    found.draft.close()
    assert not any(thread.is_alive() for thread in found.dial.threads)
    assert not found.draft.returning


def follow(draft, slot: int, start: int, count: int) -> None:
    """Give the draft the target's hidden states of these rows."""
    rows = aux_hidden_states_of(CONFIG, ROWS + 60)[:, start : start + count]
    bucket = next(one for one in BUCKETS if one >= count)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, bucket - count))
    hidden = dict(zip(CONFIG.aux_layers, padded, strict=True))
    draft.extend(Step((Segment(slot, start, count),), bucket), torch.arange(count), hidden)


def asking(slot: int, rows: int, sampling: Sampling, most: int, first: int = 0) -> DraftRequest:
    prompt = [number % 200 for number in range(rows + 1)]
    state = SlotState(RequestId(slot), prompt, rows, Sampler(sampling, tuple(prompt), TARGET.vocab_size))
    state.stops = frozenset({7})
    state.add_draft_rows(first, rows)
    return DraftRequest(slot, state, most, most)


REQUESTS = [
    asking(0, ROWS, Sampling(), 15),
    asking(1, ROWS, Sampling(temperature=0.9, top_p=0.9, seed=5), 6),
    asking(2, 40, Sampling(temperature=1.2, top_k=9, min_p=0.01, seed=2**62), 30),
]


def story(draft, drafting) -> list:
    """A bit of everything that is asked of a draft."""
    follow(draft, 0, 0, ROWS)
    follow(draft, 1, 0, 64)
    follow(draft, 1, 64, ROWS - 64)
    draft.copy_rows(0, 2, 0, 40)
    found = [drafting.propose(REQUESTS), drafting.propose(REQUESTS[:1])]
    kept = draft.rows.export(0, 16, 80)
    data = torch.cat([one.contiguous().view(torch.uint8).flatten() for one in kept.values()])
    mover, run = RowMover(draft.rows, draft.rows.spec), ((16, 80), data, 16)
    mover.copy_in(3, *run) if mover.is_addressable else mover.send_runs(3, [run], ())
    found.append(drafting.propose([asking(3, 80, Sampling(), 5, first=16)]))
    draft.offload()
    assert draft.weights_state == "parked"
    assert drafting.propose(REQUESTS[:1])[0].size == 0
    assert draft.load_back() > 0
    assert draft.load_back() == 0
    follow(draft, 3, 80, 8)
    found += [drafting.propose([asking(3, 88, Sampling(), 5, first=16)]), kept]
    draft.release()
    assert draft.weights_state == "released"
    draft.load_back()
    return [*found, drafting.propose(REQUESTS)]


@pytest.fixture(scope="module")
def expected(here: DFlashDraft) -> list:
    return story(here, Drafting(here, BUCKETS, NODES))


def same(found: list, expected: list) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, list):
            assert one == other
        else:
            assert all(same_bits(one[name], own) for name, own in other.items())


def test_a_draft_elsewhere_says_what_one_here_says(apart: Elsewhere, here: DFlashDraft, expected: list) -> None:
    same(story(apart.draft, apart.drafting), expected)
    assert any(tree != chain(tree.tokens) for tree in expected[0]), "a tree crosses as one"
    assert (apart.draft.rows.spec, apart.draft.block) == (here.rows.spec, here.block)
    assert apart.draft.memory()["weights"] > 0
    assert apart.draft.peer.hops.count
    assert not apart.heard


def test_a_decode_step_is_one_exchange(apart: Elsewhere) -> None:
    follow(apart.draft, 0, 0, 64)
    follow(apart.draft, 0, 64, 5)
    before = sum(apart.fates.seen.values())
    assert apart.drafting.propose([asking(0, 69, Sampling(), 3)])[0].size == 3
    assert sum(apart.fates.seen.values()) == before + 1


DEATHS = [
    (op, when)
    for op in (
        *(Op.HELLO, Op.PROOF, Op.LOAD_DRAFT, Op.DRAFT_STEP, Op.COPY_CONTEXT),
        *(Op.EXPORT_ROWS, Op.IMPORT_ROWS, Op.FETCH_DRAFT, Op.SEND_DRAFT_AWAY),
    )
    for when in ("asked", "answering")
]


@one_in(2, "op")
@pytest.mark.parametrize(("op", "when"), DEATHS, ids=[f"{op.name} {when}" for op, when in DEATHS])
def test_a_draft_that_dies_proposes_nothing_until_it_is_there_again(
    apart: Elsewhere, expected: list, op: Op, when: str
) -> None:
    early = op in {Op.HELLO, Op.PROOF, Op.LOAD_DRAFT}
    apart.fates.coming[:] = [(Op.DRAFT_STEP, "asked", 0), (op, when, 0)] if early else [(op, when, 0)]
    with suppress(RowsLost, OSError, AssertionError):  # what is moved is gone, and what is expected of a life is not
        story(apart.draft, apart.drafting)
    assert apart.back.wait(100)
    assert apart.heard == [False, True], "one that dies while it comes back was gone already"
    assert not apart.fates.coming
    assert apart.draft.peer.restarts == 1
    if apart.draft.weights_state != "loaded":
        apart.draft.load_back()
    assert apart.drafting.propose(REQUESTS[:1])[0].size == 0, "its context went with it"
    same(story(apart.draft, apart.drafting), expected)


def test_what_the_new_one_has_not_followed_is_not_taken_for_context(apart: Elsewhere) -> None:
    """Also where the slot's own state still says so: neither proposed from nor kept."""
    follow(apart.draft, 0, 0, ROWS)
    apart.fates.coming[:] = [(Op.DRAFT_STEP, "asked", 0)]
    assert apart.drafting.propose(REQUESTS[:1])[0].size == 0
    assert apart.back.wait(100)
    with pytest.raises(RowsLost, match=r"has no rows 0\.\.64 of slot 0"):
        apart.draft.rows.export(0, 0, 64)
    apart.draft.copy_rows(0, 1, 0, 64)
    assert apart.drafting.propose([asking(1, 64, Sampling(), 3)])[0].size == 0
    follow(apart.draft, 0, ROWS, 4)
    assert apart.draft.rows.find_context_start(0, 0, ROWS + 4) == ROWS
    assert apart.drafting.propose([asking(0, ROWS + 4, Sampling(), 3)])[0].size == 3


def test_one_that_fails_at_what_it_is_asked_is_had_anew(
    apart: Elsewhere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no exception of it is anybody's here."""

    def failing(*_: object) -> NoReturn:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patched:
        patched.setitem(ServedDraft.ops, Op.DRAFT_STEP, (DraftStep, failing))
        follow(apart.draft, 0, 0, 64)
        assert apart.drafting.propose([asking(0, 64, Sampling(), 3)])[0].size == 0
    assert apart.back.wait(100)
    assert "draft_step: a kernel failed" in caplog.text
    assert apart.draft.peer.error == "", "it is back"


def test_one_that_refuses_what_it_is_asked_proposes_nothing_to_it_and_stays(apart: Elsewhere) -> None:
    follow(apart.draft, 0, 0, 64)
    odd = asking(0, 64, Sampling(), 3)
    odd.state.tokens[-1] = TARGET.vocab_size + 5
    assert apart.drafting.propose([odd])[0].size == 0
    assert (apart.heard, apart.dial.opened) == ([], 1)
    follow(apart.draft, 0, 0, 64)
    assert apart.drafting.propose([asking(0, 64, Sampling(), 3)])[0].size == 3


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (DraftedModel(TARGET, digests=("other weights", DIGESTS[1])), "thread:0 has another draft"),
        (DraftedModel(TARGET, digests=(DIGESTS[0], "other rows")), "thread:0 has another draft"),
        (RandomModel(TARGET), "there is no draft here"),
    ],
)
def test_another_draft_is_not_taken_for_this_one(served: RandomModel, said: str) -> None:
    peer = peer_of(Threads(served))
    with pytest.raises(ValueError, match=said):
        made(peer)
    peer.close()


def test_layers_and_a_draft_are_not_asked_for_what_the_other_has(apart: Elsewhere) -> None:
    with pytest.raises(ValueError, match="keep_state is not for what is loaded here"):
        apart.draft.peer.ask(Op.KEEP_STATE, SlotCheckpoint(0, 0), Nothing)
