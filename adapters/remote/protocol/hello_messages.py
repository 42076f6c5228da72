"""What a server and a daemon say before either knows the other."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from adapters.remote.protocol.messages import Facts, Text, WireMessage

Hex: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Hello(WireMessage, frozen=True):
    """The first word is the server's. It tells nothing but a number."""

    nonce: Hex


class Challenge(WireMessage, frozen=True):
    nonce: Hex


class SecretProof(WireMessage, frozen=True):
    """Of the secret, for both nonces."""

    proof: Hex


class Welcome(WireMessage, frozen=True):
    """What a daemon says of itself, to who has proven to know the secret. rekindle: its version."""

    proof: Hex
    rekindle: Text
    facts: Facts
