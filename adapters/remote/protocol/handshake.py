"""The handshake of a connection: server and daemon prove to each other that they know the secret, without sending it.

1. The server sends `Hello` with a random number, its nonce.
2. The daemon answers `Challenge` with a nonce of its own.
3. The server sends `SecretProof`: a hash of the secret, the word "server", and both nonces.
4. The daemon answers `Welcome`: a hash with the word "daemon" instead, its version, and its facts.

The secret comes from a file or the environment. For a daemon that the server launches, the server makes a new one. What
crosses later is not encrypted, so connections to other machines need a tunnel.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from hashlib import blake2b
from typing import NoReturn, TypeVar

from attrs import frozen

from adapters.remote.protocol.channel import Channel, ConnectionBroken, WireFrame, is_failure
from adapters.remote.protocol.frames import FAILED, REPLY
from adapters.remote.protocol.hello_messages import Challenge, Hello, SecretProof, Welcome
from adapters.remote.protocol.messages import (
    Facts,
    Failure,
    Op,
    Unacceptable,
    WireMessage,
    decode_message,
    encode_message,
)

T = TypeVar("T", bound=WireMessage)
HELLO_S = 5.0  # seconds for a whole handshake at a port that strangers reach: three round trips
MOST_BYTES = 1 << 16  # bytes that may arrive during a whole handshake, which takes a few hundred


def make_proof(secret: bytes, prover: str, server_nonce: str, daemon_nonce: str) -> str:
    """Return the proof of one end. prover: "server" or "daemon"."""
    key = blake2b(secret, digest_size=32, person=b"rekindle-shard").digest()
    return blake2b(f"{prover} {server_nonce} {daemon_nonce}".encode(), digest_size=32, key=key).hexdigest()


def greet(channel: Channel, secret: bytes, version: str, seconds: float) -> Facts:
    """Carry out the server's side of the handshake and return the daemon's facts. Raises ConnectionBroken.

    seconds: for the whole handshake.
    """
    nonce = secrets.token_hex(32)
    channel.set_limits(seconds, MOST_BYTES)
    channel.send(Op.HELLO, 0, encode_message(Hello(nonce)), seconds=seconds)
    other = _receive_answer(channel, Op.HELLO, 0, Challenge, seconds).nonce
    channel.send(Op.PROOF, 1, encode_message(SecretProof(make_proof(secret, "server", nonce, other))), seconds=seconds)
    welcome = _receive_answer(channel, Op.PROOF, 1, Welcome, seconds)
    if not hmac.compare_digest(welcome.proof, make_proof(secret, "daemon", nonce, other)):
        raise channel.abort("it does not know the secret")
    if welcome.rekindle != version:
        raise channel.abort(f"it is Rekindle {welcome.rekindle[:40]}, and this {version}: both must be the same")
    channel.clear_limits()
    return welcome.facts


def _receive_answer(channel: Channel, op: Op, request: int, kind: type[T], seconds: float) -> T:
    frame = channel.answer(op, request, seconds)
    try:
        if is_failure(frame):
            raise channel.abort(f"refused: {decode_message(frame.arguments, Failure).why}")
        return decode_message(frame.arguments, kind)
    except Unacceptable as error:
        raise channel.abort(str(error)) from error


@frozen
class ProvenServer:
    """A server that has proven to know the secret.

    proof: the daemon's own proof, which the server waits for. request: the number of the frame that waits for it.
    """

    proof: str
    request: int


def challenge(channel: Channel, secret: bytes, seconds: float = HELLO_S) -> ProvenServer:
    """Make the server prove that it knows the secret. Called by the daemon. Raises ConnectionBroken.

    seconds: for the whole challenge. The daemon reveals nothing about itself: `welcome` does that later.
    """
    channel.set_limits(seconds, MOST_BYTES)
    frame, hello = _receive_request(channel, Op.HELLO, Hello, seconds)
    nonce = secrets.token_hex(32)
    channel.send(Op.HELLO, frame.head.request, encode_message(Challenge(nonce)), flags=REPLY, seconds=seconds)
    frame, given = _receive_request(channel, Op.PROOF, SecretProof, seconds)
    if not hmac.compare_digest(given.proof, make_proof(secret, "server", hello.nonce, nonce)):
        refuse(channel, Op.PROOF, frame.head.request, "the secret is another one", seconds)
    channel.clear_limits()
    return ProvenServer(make_proof(secret, "daemon", hello.nonce, nonce), frame.head.request)


def welcome(channel: Channel, proven: ProvenServer, version: str, facts: Facts, seconds: float) -> None:
    """Send the daemon's proof, version and facts to a server whose turn has come. Raises ConnectionBroken."""
    said = encode_message(Welcome(proven.proof, version, facts))
    channel.send(Op.PROOF, proven.request, said, flags=REPLY, seconds=seconds)


def _receive_request(channel: Channel, op: Op, kind: type[T], seconds: float) -> tuple[WireFrame, T]:
    """Receive one message of the handshake from the server. Any other frame is refused and ends the connection."""
    frame = channel.receive(seconds)
    found: T | None = None
    with suppress(Unacceptable):
        found = decode_message(frame.arguments, kind) if frame.head.op == op else None
    if found is None:
        refuse(channel, frame.head.op, frame.head.request, "this is no hello", seconds)
    return frame, found


def refuse(channel: Channel, op: int, request: int, why: str, seconds: float) -> NoReturn:
    """Send a failure, close the connection, and raise ConnectionBroken."""
    channel.send(op, request, encode_message(Failure.of("refused", why)), flags=REPLY | FAILED, seconds=seconds)
    channel.close(why)
    raise ConnectionBroken(why)
