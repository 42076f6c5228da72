"""Rows that lie in memory that a server lends are named to its daemons, and no others are."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from attrs import define, field
from msgspec import structs

from adapters.models.decoder.shard import NamedTensors
from adapters.remote.client import pending_answers
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.protocol.channel import Channel
from adapters.remote.protocol.lent_memory import Borrower, Lender
from adapters.remote.protocol.messages import MOST_RUNS, Lent, Nothing, Op, Unacceptable
from adapters.remote.protocol.payload_tensors import describe_tensors
from adapters.remote.protocol.peer_expectation import Deadlines
from adapters.remote.protocol.slot_messages import ImportRows, ImportRuns
from effects.ports import RowsLost
from tests.models.checkpoints import same_bits
from tests.models.splits import CONFIGS, chunk, step
from tests.remote.daemons import Fates, Mortal, RandomModel, Threads, remote

HYBRID = CONFIGS["hybrid"]


@define(eq=False)
class Weighed(Channel):
    """A daemon's end of a connection, with the bytes of all payloads that came to it. gate: where it waits before it
    takes runs.
    """

    came: list[int] = field(factory=list[int])
    gate: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.gate.set()

    def receive(self, seconds: float, *, patient: bool = False):
        frame = Channel.receive(self, seconds, patient=patient)
        self.came.append(frame.head.payload)
        if frame.head.op == Op.IMPORT_RUNS:
            assert self.gate.wait(100)
        return frame


@define(eq=False)
class Lending:
    lender: Lender
    far: RemoteShard
    end: Weighed


@pytest.fixture
def lending() -> Iterator[Lending]:
    lender, ends = Lender.open(), list[Weighed]()
    assert lender is not None

    def weighed(channel: Channel) -> Channel:
        ends.append(Weighed(channel.socket))
        return ends[-1]

    dial = Threads(RandomModel(HYBRID), meddle=weighed, lender=lender)
    far = remote(dial, range(HYBRID.num_layers))
    chunk(far, 0, 0, 64)
    yield Lending(lender, far, ends[0])
    far.close()
    dial.end()


def laid(rows: NamedTensors, memory: torch.Tensor, at: int, room: int) -> NamedTensors:
    return dict(zip(rows, whole(rows, memory, at, room), strict=True))


def whole(rows: NamedTensors, memory: torch.Tensor, at: int, room: int) -> torch.Tensor:
    """Return the rows as the beginning of one piece of memory from `at` on, which lies as a kept run of `room` rows
    does.
    """
    first = next(iter(rows.values()))
    heads, count, width = first.shape
    run = memory[at:].view(first.dtype)[: len(rows) * heads * room * width].view(len(rows), heads, room, width)
    for place, tensor in zip(run, rows.values(), strict=True):
        place[:, :count] = tensor
    return run[:, :, :count]


def test_rows_and_states_are_copied_from_where_they_lie(lending: Lending) -> None:
    far, wanted, state = lending.far, lending.far.rows.export(0, 0, 64), lending.far.states.export(0)
    for at, room in ((0, 64), (4096, 100)):  # the second is behind what the daemon has mapped by then
        memory = lending.lender.take(1 << 20)
        seen = len(lending.end.came)
        far.rows.import_(1, 0, laid(wanted, memory, at, room))
        assert lending.end.came[seen:] == [0]
        assert all(same_bits(one, wanted[name]) for name, one in far.rows.export(1, 0, 64).items())
        far.rows.import_(1, 0, {name: torch.zeros_like(one) for name, one in wanted.items()})
        assert lending.end.came[-1] > sum(one.nbytes for one in wanted.values()) - 1, "what lies elsewhere is sent"
    kept, at = dict[str, torch.Tensor](), 1 << 19
    for name, one in state.items():
        kept[name] = memory[at : at + one.nbytes].view(one.dtype).view(one.shape).copy_(one)
        at += one.nbytes
    far.states.import_(2, kept, 64)
    assert lending.end.came[-1] == 0
    assert all(same_bits(one, state[name]) for name, one in far.states.export(2).items())


def test_what_is_partly_elsewhere_is_sent(lending: Lending) -> None:
    rows = lending.far.rows.export(0, 0, 64)
    there = laid(rows, lending.lender.take(1 << 20), 0, 64)
    last = list(rows)[-1]
    lending.far.rows.import_(1, 0, there | {last: rows[last]})
    assert lending.end.came[-1] > 0
    assert all(same_bits(one, rows[name]) for name, one in lending.far.rows.export(1, 0, 64).items())


def test_runs_that_are_lent_are_told_of_at_once_and_nobody_waits_for_them(lending: Lending) -> None:
    far, rows = lending.far, lending.far.rows.export(0, 0, 64)
    memory, seen = lending.lender.take(1 << 20), len(lending.end.came)
    runs = [(0, whole(rows, memory, 0, 64)), (64, whole(rows, memory, 1 << 19, 100))]
    far.rows.import_runs(1, runs, ())
    many = [(192 + 64 * (n % 4), run) for n, (_, run) in enumerate(runs * MOST_RUNS)][: MOST_RUNS + 1]
    far.rows.import_runs(1, many, ())
    far.rows.import_runs(
        1, [(128, torch.stack([*rows.values()]))], ()
    )  # has to be sent: those before it have been answered
    turned = runs[0][1].transpose(1, 2)
    odd = lending.lender.take(turned.nbytes).view(turned.dtype).view(turned.shape).copy_(turned).transpose(1, 2)
    far.rows.import_runs(1, [(448, odd)], ())  # lies as no kept run does, and is named row by row
    assert [came > 0 for came in lending.end.came[seen:]] == [False, False, False, True, False]
    for start in range(0, 512, 64):
        assert all(same_bits(one, rows[name]) for name, one in far.rows.export(1, start, start + 64).items())


@pytest.mark.parametrize("asked", ["forward", "copy", "export"])
def test_what_is_asked_behind_runs_that_nobody_waits_for_finds_them(lending: Lending, asked: str) -> None:
    far, rows, state = lending.far, lending.far.rows.export(0, 0, 64), lending.far.states.export(0)
    far.states.import_(1, state, 64)
    far.states.import_(2, state, 64)
    lending.end.gate.clear()
    far.rows.import_runs(1, [(0, whole(rows, lending.lender.take(1 << 20), 0, 64))], ())
    opening = threading.Timer(0.05, lending.end.gate.set)
    opening.start()
    slot = 1
    if asked == "copy":
        far.rows.copy(1, 2, 64)
        slot = 2
    if asked == "export":
        assert all(same_bits(one, rows[name]) for name, one in far.rows.export(1, 0, 64).items())
    assert same_bits(step(far, (slot, 64, 1), kept=[1])[0], step(far, (0, 64, 1), kept=[1])[0])
    assert not lending.far.peer.error
    opening.join()


class Owner:
    """An object that keeps memory as long as it lives."""


def test_memory_that_is_lent_is_kept_until_what_is_in_it_has_been_put(
    lending: Lending, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, rows, losses = lending.far, lending.far.rows.export(0, 0, 64), list[str]()
    far.peer.set_loss_listener(losses.append)
    runs = [(64 * n, whole(rows, lending.lender.take(1 << 20), 0, 64)) for n in range(3)]
    monkeypatch.setattr(pending_answers, "MOST_LENT", 2 * runs[0][1].nbytes)

    def put(number: int) -> weakref.ref[Owner]:
        keep = Owner()
        far.rows.import_runs(1, [runs[number]], [keep])
        return weakref.ref(keep)

    lending.end.gate.clear()
    first, second = put(0), put(1)
    assert first() is not None
    assert second() is not None
    opening = threading.Timer(0.05, lending.end.gate.set)
    opening.start()
    third = put(2)  # which is one too many: it waits
    assert (first(), second()) == (None, None)
    assert third() is not None
    far.rows.export(0, 0, 64)
    assert third() is None
    opening.join()
    last = put(0)
    lending.end.close("killed")
    with pytest.raises(RowsLost):
        far.rows.export(0, 0, 64)
    assert last() is None, "a shard that is gone reads no more"
    assert len(losses) == 1


def test_a_run_that_is_lent_and_refused_is_a_loss(lending: Lending) -> None:
    """It is not known how much of the other runs is there."""
    far, rows = lending.far, lending.far.rows.export(0, 0, 64)
    there, losses = whole(rows, lending.lender.take(1 << 20), 0, 64), list[str]()
    far.peer.set_loss_listener(losses.append)
    far.rows.import_runs(1, [(far.spec.capacity, there), (0, there)], ())
    with pytest.raises(RowsLost, match="import_runs: rows"):
        step(far, (0, 64, 1), kept=[1])
    assert len(losses) == 1
    assert "import_runs: rows" in losses[0]
    far.peer.read_posted_answers()  # nothing that was posted is left
    chunk(far, 0, 0, 64)
    assert all(same_bits(one, rows[name]) for name, one in far.rows.export(0, 0, 64).items())
    assert far.peer.restarts == 0, "the process is the same"


def test_a_run_that_is_never_put_meets_the_deadline_of_what_is_asked_next(lending: Lending) -> None:
    far, rows, losses = lending.far, lending.far.rows.export(0, 0, 64), list[str]()
    far.peer.set_loss_listener(losses.append)
    lending.end.gate.clear()
    far.rows.import_runs(1, [(0, whole(rows, lending.lender.take(1 << 20), 0, 64))], ())
    far.peer.deadlines = Deadlines(step=0.05)
    opening = threading.Timer(0.2, lending.end.gate.set)  # or its thread would never end
    opening.start()
    with pytest.raises(RowsLost, match="no answer in time"):
        far.rows.copy(0, 2, 64)
    assert len(losses) == 1
    opening.join()


def test_a_shard_is_closed_while_it_puts_what_nobody_has_waited_for(lending: Lending) -> None:
    far, rows = lending.far, lending.far.rows.export(0, 0, 64)
    lending.end.gate.clear()
    far.rows.import_runs(1, [(0, whole(rows, lending.lender.take(1 << 20), 0, 64))], ())
    opening = threading.Timer(0.05, lending.end.gate.set)
    opening.start()
    far.close()  # waits until its thread has ended
    with pytest.raises(RowsLost, match="is closed"):
        far.rows.copy(0, 2, 64)
    opening.join()


@pytest.mark.parametrize(("when", "behind"), [("asked", 0), ("answering", 0), ("asked", 2), ("answering", 2)])
def test_a_death_among_runs_is_told_and_they_can_be_put_anew(when: str, behind: int) -> None:
    lender, fates, losses = Lender.open(), Fates(), list[str]()
    assert lender is not None
    dial = Threads(RandomModel(HYBRID), meddle=lambda one: Mortal(one.socket, doom=fates.doom), lender=lender)
    far = remote(dial, range(HYBRID.num_layers))
    far.peer.set_loss_listener(losses.append)
    chunk(far, 0, 0, 64)
    rows = far.rows.export(0, 0, 64)
    runs = [(64 * n, whole(rows, lender.take(1 << 20), 0, 64)) for n in range(4)]
    fates.coming[:] = [(Op.IMPORT_RUNS, when, behind)]
    with pytest.raises(RowsLost):
        put_all(far, runs)
    assert not fates.coming
    assert len(losses) == 1
    put_all(far, runs)
    for start, _ in runs:
        assert all(same_bits(one, rows[name]) for name, one in far.rows.export(1, start, start + 64).items())
    far.close()
    dial.end()


def put_all(far: RemoteShard, runs: list[tuple[int, torch.Tensor]]) -> None:
    for run in runs:
        far.rows.import_runs(1, [run], ())
    far.rows.copy(1, 2, 1)  # whatever it is


@pytest.mark.parametrize(
    "odd",
    [
        {"start": 1 << 20},
        {"count": 0},
        {"count": 65},
        {"offset": 1},
        {"offset": 1 << 20},
        {"room": (1 << 31) - 1},
    ],
)
def test_runs_of_other_rows_than_there_are_are_refused(lending: Lending, odd: dict) -> None:
    far, rows = lending.far, lending.far.rows.export(0, 0, 64)
    run = lending.lender.run(far.rows.spec, 0, whole(rows, lending.lender.take(1 << 20), 0, 64))
    assert run is not None
    far.rows.import_(1, 0, {name: torch.full_like(one, 2) for name, one in rows.items()})
    with pytest.raises(ValueError, match=r"rows|lent"):
        far.peer.ask(Op.IMPORT_RUNS, ImportRuns(1, (structs.replace(run, **odd), run)), Nothing)
    assert all(bool((one == 2).all()) for one in far.rows.export(1, 0, 64).values())


FINE = Lent(("a", "b"), "F32", (2, 3), 4096, 12, (6, 1))
ODD = [
    ({"offset": 1 << 50}, "which has 8192"),
    ({"offset": 8192 - 80}, "which has 8192"),  # ends behind it
    ({"shape": (1 << 30, 1 << 30, 2, 3), "strides": (1 << 30, 1 << 30, 6, 1)}, "which has 8192"),
    ({"apart": (1 << 31) - 1}, "which has 8192"),
    ({"offset": 4098}, "as no tensor can lie"),
    ({"strides": (6,)}, "as no tensor can lie"),
]


@pytest.mark.parametrize(("changed", "said"), ODD)
def test_what_is_not_lent_is_not_read(changed: dict, said: str) -> None:
    lender = Lender.open()
    assert lender is not None
    memory, borrower = lender.take(8192), Borrower(lender.descriptor)
    memory.view(torch.float32).copy_(torch.arange(2048))
    found = borrower.tensors((FINE,))
    assert torch.equal(found["b"], 1024 + 12 + torch.tensor([[0.0, 1, 2], [6, 7, 8]]))
    with pytest.raises(Unacceptable, match=said):
        borrower.tensors((FINE, structs.replace(FINE, **changed)))
    found = borrower.tensors((structs.replace(FINE, shape=(0, 3)),))
    assert found["a"].shape == (0, 3)


def test_nothing_is_borrowed_from_who_lends_nothing_nor_given_twice(lending: Lending) -> None:
    far, rows = lending.far, lending.far.rows.export(0, 0, 64)
    lent = lending.lender.locate(laid(rows, lending.lender.take(1 << 20), 0, 64))
    sent = list(rows.values())
    with pytest.raises(ValueError, match="given twice"):
        far.peer.ask(Op.IMPORT_ROWS, ImportRows(1, 0, describe_tensors(rows), lent), Nothing, sent)
    dial = Threads(RandomModel(HYBRID))
    alone = remote(dial, range(HYBRID.num_layers))
    with pytest.raises(ValueError, match="nothing is lent here"):
        alone.peer.ask(Op.IMPORT_ROWS, ImportRows(1, 0, lent=lent), Nothing)
    assert alone.peer.restarts == 0
    alone.close()
    dial.end()


def test_memory_that_could_be_taken_away_is_not_borrowed() -> None:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    with pytest.raises(Unacceptable, match="taken away"):
        Borrower(descriptor).tensors((FINE,))
    os.close(descriptor)
