"""Tests of what strangers may do at a shard's port: hold one connection for a few seconds, and learn nothing."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from attrs import define, field

from adapters.remote.client.dial import AtAddress
from adapters.remote.daemon import reception as receptions
from adapters.remote.daemon.daemon import Daemon
from adapters.remote.daemon.reception import Reception
from adapters.remote.protocol import frames
from adapters.remote.protocol.channel import Channel, ConnectionBroken
from adapters.remote.protocol.frames import FrameHead
from adapters.remote.protocol.handshake import MOST_BYTES, greet
from adapters.remote.protocol.hello_messages import Hello, SecretProof
from adapters.remote.protocol.messages import Op, encode_message
from adapters.remote.protocol.slot_messages import RowSpan
from effects.ports import RowsLost
from tests.models.splits import CONFIGS, chunk
from tests.remote.daemons import SECRET, RandomModel, peer_of, quietly, remote

DENSE, RELEASE = CONFIGS["dense"], "7.65.4321"
SHORT = 2.0  # seconds of a hello here: a busy machine takes a tenth of that for one that means well
NONCE = "ab" * 32


@define(eq=False)
class PortOfTests:
    """A daemon at a port, for one server after the other, as `rekindle shard` is."""

    hello_s: float = SHORT
    turn_s: float = 100
    served: RandomModel = field(factory=lambda: RandomModel(DENSE))
    reception: Reception = field(init=False)
    address: tuple[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = listening.getsockname()
        self.reception = Reception(listening, SECRET, self.hello_s, self.turn_s)
        self.reception.open()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            server = self.reception.next()
            quietly(Daemon(server.channel, self.served, SECRET, RELEASE, proven=server.proven))

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, 20)

    def dial(self) -> AtAddress:
        return AtAddress("tcp://here", self.address)

    def greet(self) -> None:
        """Be the owner's server, and wait until it is served. Raises ConnectionBroken after 50 s."""
        with closing(self.dial().open()) as channel:
            greet(channel, SECRET, RELEASE, 50)


@pytest.fixture
def daemon() -> Iterator[PortOfTests]:
    found = PortOfTests()
    yield found
    found.reception.close()


def framed(op: int, arguments: bytes, length: int = -1) -> bytes:
    head = FrameHead(op, 0, 1, len(arguments) if length < 0 else length, 0)
    return frames.write_frame(head, arguments) + arguments


def answered(stranger: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = bytearray()
    with suppress(ConnectionResetError):
        while piece := stranger.recv(1 << 16):
            found += piece
    return bytes(found)


@pytest.mark.parametrize("count", [12, 3 * receptions.MOST_HELLOS])
def test_connections_that_say_nothing_keep_nobody_waiting(count: int) -> None:
    """`greet` raises where the owner is not served."""
    daemon = PortOfTests(hello_s=1000)  # so no stranger is too late
    with ExitStack() as strangers:
        for _ in range(count):
            strangers.enter_context(closing(daemon.stranger()))
        daemon.greet()
    daemon.reception.close()


def test_a_connection_that_says_nothing_is_sent_away_when_its_hello_is_late(daemon: PortOfTests) -> None:
    with closing(daemon.stranger()) as stranger:
        began = time.monotonic()
        assert answered(stranger) == b""
        assert time.monotonic() - began > SHORT * 0.9


def test_a_hello_has_one_deadline_however_often_something_comes(daemon: PortOfTests) -> None:
    """A piece every now and then, each of them in time, and a whole first message in between."""
    with closing(daemon.stranger()) as stranger:
        stranger.sendall(framed(Op.HELLO, encode_message(Hello(NONCE))))
        proof = framed(Op.PROOF, encode_message(SecretProof(NONCE)))
        assert len(proof) > 50, "it takes far longer than a hello may"
        sent = 0
        with suppress(OSError):
            for byte in proof:
                stranger.sendall(bytes([byte]))
                sent += 1
                time.sleep(SHORT / 10)
        assert sent < len(proof)


@pytest.mark.parametrize("said", [65_537, 1 << 20])
def test_a_hello_of_more_than_64_kib_is_not_read(said: int) -> None:
    daemon = PortOfTests(hello_s=1000)  # so no stranger is too late
    for sent in (framed(Op.HELLO, b"", said), framed(Op.HELLO, b" " * said)):
        with closing(daemon.stranger()) as stranger:
            with suppress(OSError):
                stranger.sendall(sent)
            assert answered(stranger) == b""
    daemon.reception.close()


def test_all_messages_of_a_hello_together_are_64_kib(daemon: PortOfTests) -> None:
    hello = encode_message(Hello(NONCE))
    padded = b" " * (MOST_BYTES - 1000 - len(hello)) + hello
    with closing(daemon.stranger()) as stranger:
        stranger.sendall(framed(Op.HELLO, padded))
        with suppress(OSError):
            stranger.sendall(framed(Op.PROOF, b" " * 2000))
        assert len(answered(stranger)) < 200, "a challenge, and nothing more"


STRANGE = {
    "a hello": [framed(Op.HELLO, encode_message(Hello(NONCE)))],
    "another proof": [
        framed(Op.HELLO, encode_message(Hello(NONCE))),
        framed(Op.PROOF, encode_message(SecretProof(NONCE))),
    ],
    "a proof without a hello": [framed(Op.PROOF, encode_message(SecretProof(NONCE)))],
    "a hello of an earlier form": [framed(Op.HELLO, b'{"rekindle":"0","nonce":"' + NONCE.encode() + b'"}')],
    "no arguments": [framed(Op.HELLO, b"")],
    "bad arguments": [framed(Op.HELLO, b'{"nonce":-1}'), framed(Op.HELLO, b"[" * 9000)],
    "a question": [framed(Op.EXPORT_ROWS, encode_message(RowSpan(0, 0, 1)))],
    "an op that there is not": [framed(255, b"{}")],
    "HTTP": [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"],
    "noise": [bytes(range(256))],
}


@pytest.mark.parametrize("case", STRANGE)
def test_nothing_is_told_before_the_proof(daemon: PortOfTests, case: str) -> None:
    with closing(daemon.stranger()) as stranger:
        for piece in STRANGE[case]:
            with suppress(OSError):
                stranger.sendall(piece)
        answer_bytes = answered(stranger)
    for secret in (RELEASE, "weights", "config", "cpu", "boot"):
        assert secret.encode() not in answer_bytes
    texts = re.findall(rb'\{[^{}]*"(?:nonce|why)":"([^"]*)"\}', answer_bytes)
    assert all(re.fullmatch(rb"[0-9a-f]{64}|this is no hello|the secret is another one", one) for one in texts), (
        answer_bytes
    )
    assert answer_bytes.count(b"RKSH") == len(texts)
    assert not daemon.served.introduced
    daemon.greet()


def test_a_server_is_served_beside_hellos_and_has_its_turn(daemon: PortOfTests) -> None:
    first = remote_at(daemon)
    chunk(first, 0, 0, 64)
    with closing(daemon.stranger()), closing(daemon.stranger()) as stranger:
        stranger.sendall(framed(Op.HELLO, encode_message(Hello(NONCE))))
        assert stranger.recv(1 << 16), "it is heard while another one is served"
        chunk(first, 0, 64, 128)
    coming = list[None]()
    second = threading.Thread(target=lambda: coming.append(daemon.greet()))
    second.start()
    time.sleep(0.2)
    chunk(first, 0, 128, 192)
    assert not coming, "one server is served at a time"
    first.close()
    second.join(50)
    assert coming


def test_a_server_that_waits_in_vain_for_its_turn_is_told_so() -> None:
    daemon = PortOfTests(turn_s=0.2)
    first = remote_at(daemon)
    with pytest.raises(RowsLost, match="refused: another server is served here"):
        peer_of(daemon.dial(), version=RELEASE).connect()
    chunk(first, 0, 0, 64)
    first.close()
    daemon.greet()
    daemon.reception.close()


def remote_at(daemon: PortOfTests):
    """Layers there."""
    return remote(daemon.dial(), range(3), peer_of(daemon.dial(), version=RELEASE), config=DENSE, shared=(0, 0))


def test_a_daemon_of_another_version_is_told_apart_by_who_knows_the_secret(daemon: PortOfTests) -> None:
    with closing(daemon.dial().open()) as channel, pytest.raises(ConnectionBroken, match=f"it is Rekindle {RELEASE}"):
        greet(channel, SECRET, "0", 20)


def test_a_server_gives_up_a_daemon_whose_hello_is_late_in_all() -> None:
    """Each of its bytes comes in time."""
    ours, theirs = socket.socketpair()

    def dribble() -> None:
        with suppress(OSError):
            for byte in framed(Op.HELLO, b" " * 1000):
                theirs.sendall(bytes([byte]))
                time.sleep(0.05)

    dribbling = threading.Thread(target=dribble, daemon=True)
    dribbling.start()
    with pytest.raises(ConnectionBroken, match="no answer in time"):
        greet(Channel(ours), SECRET, RELEASE, 0.5)
    assert dribbling.is_alive(), "it has not waited for all of it, which takes 50 s"
    theirs.close()


class NoDescriptors(socket.socket):
    """Accepts nothing, as a process without a descriptor to spare does; and says when that was tried."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        raise OSError(24, "Too many open files")


def test_a_port_without_descriptors_pauses_and_closes_at_once_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receptions, "PAUSE_S", 1000)
    listening = NoDescriptors()
    reception = Reception(listening, SECRET, SHORT, SHORT)
    before = set(threading.enumerate())
    reception.open()
    (accepting,) = set(threading.enumerate()) - before
    while "a connection could not be accepted" not in caplog.text:
        time.sleep(0.001)
    reception.close()
    accepting.join(20)
    assert not accepting.is_alive()
    assert listening.tries == 1
