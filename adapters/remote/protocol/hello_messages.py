"""The messages of the handshake."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from adapters.remote.protocol.messages import Facts, Text, WireMessage

Hex: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Hello(WireMessage, frozen=True):
    """The server's first message, which contains only a random number."""

    nonce: Hex


class Challenge(WireMessage, frozen=True):
    """The daemon's answer to `Hello`, which contains only a random number."""

    nonce: Hex


class SecretProof(WireMessage, frozen=True):
    """The server's proof that it knows the secret, made from the secret and both nonces."""

    proof: Hex


class Welcome(WireMessage, frozen=True):
    """The daemon's proof and description, for a server that has proven to know the secret. rekindle: its version."""

    proof: Hex
    rekindle: Text
    facts: Facts
