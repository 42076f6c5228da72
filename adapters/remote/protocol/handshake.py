"""Who is at the other end: both prove that they know the secret, without saying it; neither believes the other before.

The secret is in a file or the environment, and for a daemon that the server launched made by it. What crosses later is
not encrypted: over anything but loopback, use a tunnel.
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
HELLO_S = 5.0  # for a whole hello at a port that strangers reach: three round trips
MOST_BYTES = 1 << 16  # of a whole hello, either way; it takes a few hundred


def proof_of(secret: bytes, who: str, theirs: str, ours: str) -> str:
    """who: proves it. theirs, ours: the nonces, the server's first."""
    key = blake2b(secret, digest_size=32, person=b"rekindle-shard").digest()
    return blake2b(f"{who} {theirs} {ours}".encode(), digest_size=32, key=key).hexdigest()


def greet(channel: Channel, secret: bytes, version: str, seconds: float) -> Facts:
    """By the server, within so many seconds altogether. Raises Broken."""
    nonce = secrets.token_hex(32)
    channel.bound(seconds, MOST_BYTES)
    channel.send(Op.HELLO, 0, encode_message(Hello(nonce)), seconds=seconds)
    other = _said(channel, Op.HELLO, 0, Challenge, seconds).nonce
    channel.send(Op.PROOF, 1, encode_message(SecretProof(proof_of(secret, "server", nonce, other))), seconds=seconds)
    welcome = _said(channel, Op.PROOF, 1, Welcome, seconds)
    if not hmac.compare_digest(welcome.proof, proof_of(secret, "daemon", nonce, other)):
        raise channel.broken("it does not know the secret")
    if welcome.rekindle != version:
        raise channel.broken(f"it is Rekindle {welcome.rekindle[:40]}, and this {version}: both must be the same")
    channel.unbind()
    return welcome.facts


def _said(channel: Channel, op: Op, request: int, kind: type[T], seconds: float) -> T:
    frame = channel.answer(op, request, seconds)
    try:
        if is_failure(frame):
            raise channel.broken(f"refused: {decode_message(frame.arguments, Failure).why}")
        return decode_message(frame.arguments, kind)
    except Unacceptable as error:
        raise channel.broken(str(error)) from error


@frozen
class ProvenServer:
    """Who has proven to know the secret. proof: the daemon's own, which the server waits for. request: its question."""

    proof: str
    request: int


def challenge(channel: Channel, secret: bytes, seconds: float = HELLO_S) -> ProvenServer:
    """By the daemon: have the server prove that it knows the secret, and tell it nothing. Raises Broken.

    seconds: for all of it. What is wrong is answered in the same words, whatever it is.
    """
    channel.bound(seconds, MOST_BYTES)
    frame, hello = _asked(channel, Op.HELLO, Hello, seconds)
    nonce = secrets.token_hex(32)
    channel.send(Op.HELLO, frame.head.request, encode_message(Challenge(nonce)), flags=REPLY, seconds=seconds)
    frame, given = _asked(channel, Op.PROOF, SecretProof, seconds)
    if not hmac.compare_digest(given.proof, proof_of(secret, "server", hello.nonce, nonce)):
        refuse(channel, Op.PROOF, frame.head.request, "the secret is another one", seconds)
    channel.unbind()
    return ProvenServer(proof_of(secret, "daemon", hello.nonce, nonce), frame.head.request)


def welcome(channel: Channel, proven: ProvenServer, version: str, facts: Facts, seconds: float) -> None:
    """By the daemon, to a server whose turn it is. Raises Broken."""
    said = encode_message(Welcome(proven.proof, version, facts))
    channel.send(Op.PROOF, proven.request, said, flags=REPLY, seconds=seconds)


def _asked(channel: Channel, op: Op, kind: type[T], seconds: float) -> tuple[WireFrame, T]:
    """Nothing else is listened to."""
    frame = channel.receive(seconds)
    found: T | None = None
    with suppress(Unacceptable):
        found = decode_message(frame.arguments, kind) if frame.head.op == op else None
    if found is None:
        refuse(channel, frame.head.op, frame.head.request, "this is no hello", seconds)
    return frame, found


def refuse(channel: Channel, op: int, request: int, why: str, seconds: float) -> NoReturn:
    """Say so, and have nothing more to do with it."""
    channel.send(op, request, encode_message(Failure.of("refused", why)), flags=REPLY | FAILED, seconds=seconds)
    channel.close(why)
    raise ConnectionBroken(why)
