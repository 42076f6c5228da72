"""Redaction: a trace without its text that still replays.

Every token is replaced by a digest of the sequence up to it (keyed, the key is thrown away), so that equal prefixes
stay equal, which is all the core compares, and nothing else can be read off. Stop tokens stay what they are. The asks
of a redacted trace are what a second fold over the redacted events gives.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from attrs import define, evolve, field

from effects.decode import Decoded
from effects.ids import RequestId, Tokens
from effects.lookup import PrefixFound, PrefixMissed
from effects.pflash import PromptCompressed
from engine.runner import Envelope
from states.events import Event, Submitted
from states.life import Held, remains
from states.world import Out, World, advance


@define
class Redactor:
    world: World
    key: bytes = field(factory=lambda: secrets.token_bytes(32), repr=False)
    _chains: dict[RequestId, bytes] = field(factory=dict[RequestId, bytes])

    def again(self, envelope: Envelope) -> tuple[Envelope, tuple[Out, ...], World]:
        """The same envelope without its text, and what follows from it."""
        event = self.redact(envelope.request, envelope.event)
        self.world, outs = advance(self.world, envelope.request, event)
        if envelope.request not in self.world.requests:
            self._chains.pop(envelope.request, None)
        return evolve(envelope, event=event), outs, self.world

    def redact(self, request: RequestId, event: Event) -> Event:
        match event:
            case Submitted(job):
                sampling = evolve(job.sampling, logit_bias=())
                return Submitted(evolve(job, prompt=self.prompt(request, job.prompt), sampling=sampling))
            case PromptCompressed(prompt, _):
                return evolve(event, prompt=self.prompt(request, prompt))
            case PrefixFound(served=tuple() as served) | PrefixMissed(served=tuple() as served):
                return evolve(event, served=self.prompt(request, served))
            case Decoded(tokens):
                state = self.world.requests.get(request)
                stops = remains(state).prompt.job.stop_tokens if isinstance(state, Held) else ()
                return evolve(event, tokens=self.chain(request, tokens, stops), logprobs=())
            case _:
                return event

    def prompt(self, request: RequestId, tokens: Tokens) -> Tokens:
        self._chains[request] = b""
        return self.chain(request, tokens, ())

    def chain(self, request: RequestId, tokens: Tokens, stops: Tokens) -> Tokens:
        link, out = self._chains.get(request, b""), list[int]()
        for token in tokens:
            link = blake2b(link + token.to_bytes(8, "little"), key=self.key, digest_size=16).digest()
            out.append(token if token in stops else int.from_bytes(link[:5], "little"))
        self._chains[request] = link
        return tuple(out)
