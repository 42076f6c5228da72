"""Tests that an answer which is late, wrong or missing ends a connection for good: its rows are lost, and the next
connection begins anew.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from attrs import define, field

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.step import Segment, Step
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.protocol import frames
from adapters.remote.protocol.channel import Channel, ConnectionBroken, is_failure
from adapters.remote.protocol.frames import REPLY, FrameHead
from adapters.remote.protocol.handshake import greet
from adapters.remote.protocol.messages import Failure, Op, decode_message, encode_message
from adapters.remote.protocol.peer_expectation import Deadlines
from adapters.remote.protocol.slot_messages import RowSpan
from effects.ports import RowsLost
from tests.models.checkpoints import same_bits
from tests.models.splits import CONFIGS, chunk, step, whole_of
from tests.pairs import one_in
from tests.remote.daemons import (
    QUICK,
    SECRET,
    VERSION,
    Fates,
    Mortal,
    RandomModel,
    Threads,
    part,
    peer_of,
    remote,
    slowly,
    with_facts,
)

HASTY = Deadlines(step=0.05)  # where nothing comes at all
DENSE, HYBRID = CONFIGS["dense"], CONFIGS["hybrid"]


@define(eq=False)
class HybridPair:
    """The hybrid: layers 0 to 2 on a thread, with whatever is to become of that, 3 and 4 here."""

    fates: Fates = field(factory=Fates)
    losses: list[str] = field(factory=list[str])
    dial: Threads = field(init=False)
    far: RemoteShard = field(init=False)
    whole: Pipeline = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dial = Threads(RandomModel(HYBRID), meddle=lambda channel: Mortal(channel.socket, doom=self.fates.doom))
        self.far = remote(self.dial, range(3))
        self.far.peer.pause_s = 0
        how = {"slots": 3, "capacity": 512, "aux_layers": (0, 2, 4), "state_checkpoints": 2}
        self.whole = Pipeline((self.far, part(HYBRID, range(3, 5), torch.bfloat16, **how)))


@pytest.fixture(scope="module")
def pair() -> Iterator[HybridPair]:
    found = HybridPair()
    yield found
    found.whole.close()


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return life(whole_of("hybrid"))


def life(shard: DenseShard | Pipeline) -> list[torch.Tensor]:
    """A bit of everything that is asked of a shard, and the logits of it."""
    chunk(shard, 0, 0, 128)
    found = [step(shard, (0, 128, 1), kept=[1])[0], step(shard, (0, 129, 5), kept=[2])[0]]
    shard.rows.copy(0, 1, 131)
    shard.states.copy(0, 1)
    shard.states.keep(0, 1)
    shard.states.load(1, 2)
    shard.rows.import_(2, 0, shard.rows.export(0, 0, 128))
    shard.states.import_(2, shard.states.export(0), 128)
    found += [step(shard, (2, 128, 3), kept=[3])[0], step(shard, (1, 131, 2), kept=[2])[0]]
    shard.rows.export(1, 0, 64)  # and so the last commit is heard of
    return found


DEATHS = [
    (op, when)
    for op in Op
    if op < Op.LOAD_DRAFT and op not in {Op.LOGITS, Op.PROVE, Op.IMPORT_RUNS}  # of runs tells test_lending
    for when in ("asked", "answering")
]


@one_in(2, "op")
@pytest.mark.parametrize(("op", "when"), DEATHS, ids=[f"{op.name} {when}" for op, when in DEATHS])
def test_a_death_is_told_once_and_the_next_life_is_right(pair: HybridPair, expected, op: Op, when: str) -> None:
    pair.far.peer.set_loss_listener(pair.losses.append)
    pair.losses.clear()
    early = op in {Op.HELLO, Op.PROOF, Op.LOAD}
    pair.fates.coming[:] = [(Op.FORWARD, "asked", 0), (op, when, 0)] if early else [(op, when, 0)]
    for _ in range(2 if early else 1):
        with pytest.raises(RowsLost, match="thread:0") as said:
            life(pair.whole)
        assert not said.value.slots  # every listener was notified by now
    found = life(pair.whole)
    assert not pair.fates.coming
    assert len(pair.losses) == 1  # one that was never there again had lost nothing more
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def test_a_slow_link_takes_longer_and_loses_nothing(expected) -> None:
    """Everything goes over it, in pieces that are no frames: nothing is given up that is still coming."""
    dial, losses = Threads(RandomModel(HYBRID), sharing=False, meddle=slowly), list[str]()
    far = remote(dial, range(3))
    far.peer.set_loss_listener(losses.append)
    how = {"slots": 3, "capacity": 512, "aux_layers": (0, 2, 4), "state_checkpoints": 2}
    whole = Pipeline((far, part(HYBRID, range(3, 5), torch.bfloat16, **how)))
    try:
        found = life(whole)
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))
        assert (dial.opened, losses) == (1, [])
    finally:
        whole.close()


def test_all_slots_are_lost_where_nobody_listens() -> None:
    dial = Threads(RandomModel(DENSE))
    far = remote(dial, range(5))
    dial.kill()
    with pytest.raises(RowsLost) as said:
        chunk(far, 0, 0, 64)
    assert said.value.slots == (0, 1, 2)
    with pytest.raises(RowsLost):
        far.rows.export(0, 0, 64)
    far.close()
    far.close()
    with pytest.raises(RowsLost, match="is closed"):
        chunk(far, 0, 0, 64)


WRONG = {
    "another secret": (lambda: Threads(RandomModel(DENSE), secret=b"another secret"), "the secret is another one"),
    "another version": (
        lambda: Threads(RandomModel(DENSE), version="9"),
        "it is Rekindle 9, and this 0.0.0: both must be the same",
    ),
    "other weights": (
        lambda: Threads(with_facts(RandomModel(DENSE), weights="odd")),
        "its weights are odd",
    ),
    "another shape": (
        lambda: Threads(with_facts(RandomModel(DENSE), config="odd")),
        "its configuration",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_somebody_else_is_not_connected_to(case: str) -> None:
    made, said = WRONG[case]
    dial = made()
    with pytest.raises(RowsLost, match=said):
        peer_of(dial).connect()
    dial.end()


def test_layers_that_are_not_there_are_refused() -> None:
    for layers in (range(3, 6), range(4, 4)):
        peer = peer_of(Threads(RandomModel(DENSE)))
        with pytest.raises(ValueError, match="is not a run of the model's 5 layers"):
            remote(peer.dial, layers, peer)
        peer.close()


def test_a_daemon_says_who_it_is_to_nobody_who_does_not_know_the_secret() -> None:
    served = RandomModel(DENSE)
    dial = Threads(served)
    channel = dial.open()
    with pytest.raises(ConnectionBroken, match="the secret is another one"):
        greet(channel, b"guessed", VERSION, 20)
    channel.close()
    dial.end()
    assert not served.introduced


def test_a_server_does_not_believe_a_daemon_that_only_listens() -> None:
    """It does not know the secret, and says yes to everything."""
    ours, theirs = socket.socketpair()

    def answering() -> None:
        end = Channel(theirs)
        with suppress(ConnectionBroken):
            for body in (
                b'{"nonce":"' + b"0" * 64 + b'"}',
                b'{"proof":"' + b"0" * 64 + b'","rekindle":"0.0.0","facts":' + FACTS + b"}",
            ):
                head = end.receive(20).head
                end.send(head.op, head.request, body, flags=REPLY, seconds=20)

    thread = threading.Thread(target=answering)
    thread.start()
    with pytest.raises(ConnectionBroken, match="it does not know the secret"):
        greet(Channel(ours), SECRET, VERSION, 20)
    thread.join()
    theirs.close()


FACTS = b'{"weights":"weights","config":"config","layers":5,"device":"cpu","boot":"","pid":1,"free":1}'


# --- answers that are none ---


@define(eq=False)
class Lying(Channel):
    """A daemon's end that answers forwards as it likes."""

    answer: Callable[[Lying, int, int], None] = lambda *_: None

    def send(self, op, request, arguments, tensors=(), *, flags=0, seconds=None) -> None:
        if op == Op.FORWARD:
            self.answer(self, op, request)
        else:
            Channel.send(self, op, request, arguments, tensors, flags=flags, seconds=seconds)


def raw(data: bytes) -> Callable[[Lying, int, int], None]:
    return lambda end, *_: end.socket.sendall(data)


def framed(arguments: bytes, payload: bytes = b"", request: int = -1) -> Callable[[Lying, int, int], None]:
    def answer(end: Lying, op: int, number: int) -> None:
        head = FrameHead(op, REPLY, number if request < 0 else request, len(arguments), len(payload))
        end.socket.sendall(frames.write_frame(head, arguments, [memoryview(payload)]) + arguments + payload)

    return answer


def oversized(end: Lying, op: int, number: int) -> None:
    head = FrameHead(op, REPLY, number, 2, 1 << 40)
    end.socket.sendall(frames.write_frame(head, b"{}") + b"{}")


def late(end: Lying, op: int, number: int) -> None:
    """Answer when no call waits for it any more."""
    while not end.why:
        time.sleep(0.01)
    with suppress(OSError):
        framed(b'{"ns":1}')(end, op, number)


LIES = {
    "noise": (raw(bytes(range(256))), "does not begin as a frame does"),
    "half a head": (lambda end, *_: (end.socket.sendall(b"RKSH\1\0"), end.close()), "closed the connection"),
    "an oversized payload": (oversized, "accepted now: at most"),
    "arguments of something else": (framed(b'{"raised":true}'), "no Forwarded"),
    "no tensors": (framed(b'{"ns":1}'), "other tensors than were asked for"),
    "a tensor that is not there": (framed(b'{"ns":1,"tensors":[["hidden","BF16",[64,96]]]}'), "in a payload of 0"),
    "another shape": (framed(b'{"ns":1,"tensors":[["hidden","U8",[1]]]}', b"x"), "other tensors than were asked for"),
    "an answer to something else": (framed(b'{"ns":1}', request=77), "an answer to 16"),
    "nothing": (lambda *_: None, "no answer in time"),
    "nothing in time": (late, "no answer in time"),
}


@pytest.mark.parametrize("case", LIES)
def test_an_answer_that_is_none_ends_the_connection(case: str) -> None:
    answer, said = LIES[case]
    dial = Threads(RandomModel(DENSE), meddle=lambda channel: Lying(channel.socket, answer=answer))
    far = remote(dial, range(3))
    losses = list[str]()
    far.peer.set_loss_listener(losses.append)
    far.peer.deadlines = HASTY if said == "no answer in time" else QUICK
    with pytest.raises(RowsLost, match=said):
        chunk(far, 0, 0, 64)
    assert len(losses) == 1
    dial.meddle, far.peer.deadlines = (lambda channel: channel), QUICK
    whole = whole_of("dense")
    chunk(far, 0, 0, 64)  # had anew, and right
    chunk(whole, 0, 0, 64)
    theirs, ours = far.rows.export(0, 0, 64), whole.rows.export(0, 0, 64)
    assert all(same_bits(one, ours[name]) for name, one in theirs.items())
    assert far.peer.restarts == 1
    far.close()


# --- what a daemon is asked ---


@pytest.fixture
def asking() -> Iterator[Channel]:
    """A server's end of a connection, past the hello; nothing is loaded."""
    dial = Threads(RandomModel(DENSE))
    channel = dial.open()
    greet(channel, SECRET, VERSION, 20)
    yield channel
    channel.close()
    dial.end()


@pytest.mark.parametrize(
    ("op", "arguments", "said"),
    [
        (77, b"{}", "there is no op 77"),
        (Op.HELLO, b"{}", "there is no op 1"),
        (Op.EXPORT_ROWS, b'{"slot":0,"start":0}', "arguments that are no RowSpan"),
        (Op.EXPORT_ROWS, b"\xff", "arguments that are no RowSpan"),
        (Op.EXPORT_ROWS, encode_message(RowSpan(0, 0, 64)), "no layers are loaded"),
        (Op.COMMIT, b'{"step":{"segments":[[0,0,1]],"bucket":4,"rows_only":false},"kept":[1]}', "no layers are loaded"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_connection_goes_on(
    asking, op: int, arguments: bytes, said: str
) -> None:
    for request, payload in ((5, []), (6, [torch.zeros(900)])):  # an answer that is not needed is read all the same
        asking.send(op, request, arguments, payload, seconds=20)
        frame = asking.answer(op, request, 20)
        assert is_failure(frame)
        failure = decode_message(frame.arguments, Failure)
        assert failure.kind == "refused"
        assert said in failure.why or (payload and "tensors of 0 bytes in a payload of 3600" in failure.why)


def test_what_no_shard_has_is_refused_by_name() -> None:
    dial = Threads(RandomModel(HYBRID))
    far = remote(dial, range(3, 5))
    one, many = torch.zeros(1, 96, dtype=torch.bfloat16), torch.zeros(65, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"slot 3 is not in 0\.\.2"):
        far.forward(Step((Segment(3, 0, 1),), 4), one)
    with pytest.raises(ValueError, match="1 rows at bucket 5"):
        far.forward(Step((Segment(0, 0, 1),), 5), one)
    with pytest.raises(ValueError, match=r"65 rows of slot 0 .* at most"):
        far.forward(Step((Segment(0, 0, 65),), 128), many)
    with pytest.raises(ValueError, match="checkpoint 2 is not one of 2"):
        far.states.keep(0, 2)
    with pytest.raises(ValueError, match="is missing or not expected"):
        far.rows.import_(0, 0, {"layers.9.k": one})
    with pytest.raises(ValueError, match="not a span"):
        far.rows.export(0, 0, 100_000)
    with pytest.raises(ValueError, match="lack the embedding"):
        far.embedding  # noqa: B018 - it is a property
    assert not far.peer.error
    far.synchronize()
    far.close()


def test_a_commit_that_fails_is_a_loss() -> None:
    """No call waited for it, so it is not known whose rows it was about."""
    far = remote(Threads(RandomModel(DENSE)), range(5))
    losses = list[str]()
    far.peer.set_loss_listener(losses.append)
    chunk(far, 0, 0, 64)
    far.commit(Step((Segment(0, 64, 1),), 5), [1])
    with pytest.raises(RowsLost, match="commit: 1 rows at bucket 5"):
        far.rows.export(0, 0, 64)
    assert len(losses) == 1
    chunk(far, 0, 0, 64)
    assert far.peer.restarts == 0, "a refusal ends no process"
    far.close()


def test_a_step_whose_end_was_never_told_holds_no_later_one_up() -> None:
    """A server that has lost its rows in the middle of a step says nothing more of it."""
    far = remote(Threads(RandomModel(HYBRID)), range(3))
    far.peer.set_loss_listener(lambda _: None)
    with pytest.raises(RowsLost), far.settling(Step((Segment(0, 0, 4),), 4, rows_only=True)):
        raise RowsLost((), "of another shard")
    for _ in range(2):
        with far.settling(Step((Segment(0, 0, 64),), 64, rows_only=True)):
            chunk(far, 0, 0, 64)
    far.peer.read_posted_answers()
    assert not far.peer.error
    far.close()


def test_a_daemon_that_computes_otherwise_than_before_is_not_taken_back() -> None:
    served = RandomModel(DENSE)
    dial = Threads(served)
    far = remote(dial, range(5))
    far.peer.set_loss_listener(lambda _: None)
    dial.served = other = RandomModel(HYBRID)
    dial.kill()
    with pytest.raises(RowsLost):
        chunk(far, 0, 0, 64)
    with pytest.raises(RowsLost, match="it has other rows or states than before"):
        chunk(far, 0, 0, 64)
    built = len(other.built)
    with pytest.raises(RowsLost, match="it has other rows or states than before"):
        chunk(far, 0, 0, 64)
    assert len(other.built) == built, "nor asked again at once"
    far.close()
