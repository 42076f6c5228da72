"""Redaction: a trace without its text that still replays.

Every token is replaced by a digest of the sequence up to it. The digest is keyed, and the key is thrown away. So equal
prefixes stay equal, which is all that the core compares, and nothing else can be read from them. Stop tokens stay what
they are. The effects of a redacted trace are those that a second fold over the redacted events asks for.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

from attrs import define, evolve, field

from effects.all import Outcome
from effects.decode import Decoded
from effects.ids import RequestId, Tokens
from effects.prompt_compression import PromptCompressed
from engine.core.event_loop import Envelope
from states.events import Cancelled, Derived, Event, ForEngine, ForLaunch, ForModel, ForRequest, Submitted
from states.request_states import Speculating, StateWithSlot, get_remainder
from states.world import Output, World, advance


@define
class SequenceDigests:
    """The digests of one request's sequence.

    latest: of all its tokens so far. prompt_end: of its prompt alone. An answer that is computed a second time starts
    again from there.
    """

    latest: bytes = b""
    prompt_end: bytes = b""


@define
class Redactor:
    """Folds redacted events into a world of its own. key: random, and never written."""

    world: World
    key: bytes = field(factory=lambda: secrets.token_bytes(32), repr=False)
    _digests: dict[RequestId, SequenceDigests] = field(factory=dict[RequestId, "SequenceDigests"])

    def redact_envelope(self, envelope: Envelope) -> tuple[Envelope, tuple[Output, ...], World]:
        """Return the envelope without its text, what it asks for, and the world after it."""
        match envelope.happened:
            case ForRequest(request, event):
                envelope = evolve(envelope, happened=ForRequest(request, self.redact_event(request, event)))
            case ForLaunch(outcomes):
                redacted = tuple(
                    evolve(outcome, outcome=self.redact_outcome(outcome.request, outcome.outcome))
                    for outcome in outcomes
                )
                envelope = evolve(envelope, happened=ForLaunch(redacted))
            case ForEngine() | ForModel():
                pass
        self.world, outs = advance(self.world, envelope.happened)
        for left in self._digests.keys() - self.world.requests.keys():
            del self._digests[left]
        return envelope, outs, self.world

    def redact_event(self, request: RequestId, event: Event) -> Event:
        """Return the event without tokens, names, biases and probabilities that could tell its text."""
        if isinstance(event, Derived | Cancelled):
            return event
        if not isinstance(event, Submitted):
            return self.redact_outcome(request, event)
        job = event.job
        sampling = evolve(job.sampling, logit_bias=(), grammar=None)
        # names are digests of text, by which a reader who guesses the text could recognise it
        parts = tuple(evolve(part, name="") for part in job.compression.parts)
        compression = evolve(job.compression, parts=parts)
        prompt = self.redact_prompt(request, job.prompt)
        return Submitted(evolve(job, prompt=prompt, sampling=sampling, compression=compression))

    def redact_outcome(self, request: RequestId, outcome: Outcome) -> Outcome:
        """Return the outcome with digests in the place of tokens, and without probabilities."""
        match outcome:
            case PromptCompressed(prompt, _) if prompt:
                return evolve(outcome, prompt=self.redact_prompt(request, prompt))
            case Decoded(tokens):
                state = self.world.requests.get(request)
                stops = get_remainder(state).prompt.job.stop_tokens if isinstance(state, StateWithSlot) else ()
                if isinstance(state, Speculating) and not state.answer.tokens:
                    # These are the first tokens of its answer, or they are computed a second time.
                    self._digests[request].latest = self._digests[request].prompt_end
                return evolve(outcome, tokens=self.redact_tokens(request, tokens, stops), logprobs=())
            case _:
                return outcome

    def redact_prompt(self, request: RequestId, tokens: Tokens) -> Tokens:
        """Return the digests of a prompt, which begins the sequence of its request."""
        links = self._digests[request] = SequenceDigests()
        redacted = self.redact_tokens(request, tokens, ())
        links.prompt_end = links.latest
        return redacted

    def redact_tokens(self, request: RequestId, tokens: Tokens, stops: Tokens) -> Tokens:
        """Return digests that continue the request's sequence. stops: tokens that stay what they are."""
        links = self._digests.setdefault(request, SequenceDigests())
        out = list[int]()
        link = links.latest
        for token in tokens:
            link = blake2b(link + token.to_bytes(8, "little"), key=self.key, digest_size=16).digest()
            out.append(token if token in stops else int.from_bytes(link[:5], "little"))
        links.latest = link
        return tuple(out)
