"""Who is at the other end: both prove that they know the secret, without saying it; neither believes the other before.

The secret is in a file or the environment, and for a daemon that the server launched made by it. What crosses later is
not encrypted: over anything but loopback, use a tunnel.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from hashlib import blake2b
from typing import NoReturn, TypeVar

from adapters.remote.channel import Channel, ConnectionBroken, WireFrame, failed
from adapters.remote.frames import FAILED, REPLY, FrameHead
from adapters.remote.messages import (
    Challenge,
    Facts,
    Failure,
    Hello,
    Op,
    SecretProof,
    Unacceptable,
    Welcome,
    WireMessage,
    decoded,
    encoded,
)

T = TypeVar("T", bound=WireMessage)


def proof_of(secret: bytes, who: str, theirs: str, ours: str) -> str:
    """who: proves it. theirs, ours: the nonces, the server's first."""
    key = blake2b(secret, digest_size=32, person=b"rekindle-shard").digest()
    return blake2b(f"{who} {theirs} {ours}".encode(), digest_size=32, key=key).hexdigest()


def greet(channel: Channel, secret: bytes, version: str, seconds: float) -> Facts:
    """By the server. Raises Broken."""
    nonce = secrets.token_hex(32)
    channel.send(Op.HELLO, 0, encoded(Hello(version, nonce)), seconds=seconds)
    other = _said(channel, Op.HELLO, 0, Challenge, seconds).nonce
    channel.send(Op.PROOF, 1, encoded(SecretProof(proof_of(secret, "server", nonce, other))), seconds=seconds)
    welcome = _said(channel, Op.PROOF, 1, Welcome, seconds)
    if not hmac.compare_digest(welcome.proof, proof_of(secret, "daemon", nonce, other)):
        raise channel.broken("it does not know the secret")
    return welcome.facts


def _said(channel: Channel, op: Op, request: int, kind: type[T], seconds: float) -> T:
    frame = channel.answer(op, request, seconds)
    try:
        if failed(frame):
            raise channel.broken(f"refused: {decoded(frame.arguments, Failure).why}")
        return decoded(frame.arguments, kind)
    except Unacceptable as error:
        raise channel.broken(str(error)) from error


def receive(channel: Channel, secret: bytes, version: str, facts: Callable[[], Facts], seconds: float) -> None:
    """By the daemon, which says who it is to nobody else. Raises Broken."""
    frame, hello = _asked(channel, Op.HELLO, Hello, seconds)
    if hello.rekindle != version:
        why = f"this is Rekindle {version}, and the server {hello.rekindle[:40]}: both must be the same"
        refuse(channel, frame.head, why, seconds)
    nonce = secrets.token_hex(32)
    channel.send(Op.HELLO, frame.head.request, encoded(Challenge(nonce)), flags=REPLY, seconds=seconds)
    frame, given = _asked(channel, Op.PROOF, SecretProof, seconds)
    if not hmac.compare_digest(given.proof, proof_of(secret, "server", hello.nonce, nonce)):
        refuse(channel, frame.head, "the secret is another one", seconds)
    own = Welcome(proof_of(secret, "daemon", hello.nonce, nonce), facts())
    channel.send(Op.PROOF, frame.head.request, encoded(own), flags=REPLY, seconds=seconds)


def _asked(channel: Channel, op: Op, kind: type[T], seconds: float) -> tuple[WireFrame, T]:
    """Nothing else is listened to."""
    frame = channel.receive(seconds)
    if frame.head.op != op:
        refuse(channel, frame.head, f"{op.name.lower()} has to come first", seconds)
    try:
        return frame, decoded(frame.arguments, kind)
    except Unacceptable as error:
        refuse(channel, frame.head, str(error), seconds)


def refuse(channel: Channel, head: FrameHead, why: str, seconds: float) -> NoReturn:
    """Say so, and have nothing more to do with it."""
    channel.send(head.op, head.request, encoded(Failure.of("refused", why)), flags=REPLY | FAILED, seconds=seconds)
    channel.close(why)
    raise ConnectionBroken(why)
