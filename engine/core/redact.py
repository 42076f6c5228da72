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
from effects.pflash import PromptCompressed
from engine.core.event_loop import Envelope
from states.events import Event, ForEngine, ForModel, ForRequest, Submitted
from states.request_states import Held, Speculating, get_remainder
from states.world import Output, World, advance


@define
class Links:
    """Of a request: the digest of all its tokens so far, and of its prompt alone, from which an answer starts."""

    last: bytes = b""
    served: bytes = b""


@define
class Redactor:
    world: World
    key: bytes = field(factory=lambda: secrets.token_bytes(32), repr=False)
    _links: dict[RequestId, Links] = field(factory=dict[RequestId, "Links"])

    def again(self, envelope: Envelope) -> tuple[Envelope, tuple[Output, ...], World]:
        """The same envelope without its text, and what follows from it."""
        match envelope.happened:
            case ForRequest(request, event):
                envelope = evolve(envelope, happened=ForRequest(request, self.redact(request, event)))
            case ForEngine() | ForModel():
                pass
        self.world, outs = advance(self.world, envelope.happened)
        for left in self._links.keys() - self.world.requests.keys():
            del self._links[left]
        return envelope, outs, self.world

    def redact(self, request: RequestId, event: Event) -> Event:
        match event:
            case Submitted(job):
                sampling = evolve(job.sampling, logit_bias=(), grammar=None)
                # names are digests of text, which somebody who guesses it could recognise
                parts = tuple(evolve(part, name="") for part in job.compression.parts)
                compression = evolve(job.compression, parts=parts)
                prompt = self.prompt(request, job.prompt)
                return Submitted(evolve(job, prompt=prompt, sampling=sampling, compression=compression))
            case PromptCompressed(prompt, _) if prompt:
                return evolve(event, prompt=self.prompt(request, prompt))
            case Decoded(tokens):
                state = self.world.requests.get(request)
                stops = get_remainder(state).prompt.job.stop_tokens if isinstance(state, Held) else ()
                if isinstance(state, Speculating) and not state.answer.tokens:
                    self._links[request].last = self._links[request].served  # its first, or its first once more
                return evolve(event, tokens=self.chain(request, tokens, stops), logprobs=())
            case _:
                return event

    def prompt(self, request: RequestId, tokens: Tokens) -> Tokens:
        links = self._links[request] = Links()
        redacted = self.chain(request, tokens, ())
        links.served = links.last
        return redacted

    def chain(self, request: RequestId, tokens: Tokens, stops: Tokens) -> Tokens:
        links, out = self._links.setdefault(request, Links()), list[int]()
        link = links.last
        for token in tokens:
            link = blake2b(link + token.to_bytes(8, "little"), key=self.key, digest_size=16).digest()
            out.append(token if token in stops else int.from_bytes(link[:5], "little"))
        links.last = link
        return tuple(out)
