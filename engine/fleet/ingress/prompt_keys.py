"""Computes the block keys of a request's prompt in the ingress, which has a tokenizer and a template but no weights.

The request is read, rendered and tokenized by the code of the HTTP server itself. A request that this code refuses has
no keys: the replica that gets it says what is wrong. Turns whose tokens only a replica remembers are tokenized anew, so
their keys may differ from those that the replica holds. Wrong keys cost time and change no answer.
"""

from __future__ import annotations

from typing import Any

from attrs import define, evolve, field

from adapters.http.apis.api import Api
from adapters.http.apis.openai_responses import PATH as RESPONSES
from adapters.http.apis.openai_responses import make_responses_api
from adapters.http.apis.registry import STATELESS
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.response_store import ResponseFolder, ResponseStore
from adapters.http.request import controls
from adapters.http.request.parsed_request import ApiClient
from adapters.http.wire.errors import ApiError
from adapters.http.wire.fields import Fields
from adapters.http.wire.read_body import parse_body
from adapters.store.block_keys import chain_keys, compute_root, pack_tokens
from adapters.text.model_text import Text
from adapters.text.tokenizer import TokenizerPanicked
from engine.fleet.replica_facts import ReplicaFacts
from engine.fleet.router.route_keys import RouteKeys

APIS: dict[str, Api[Any]] = {
    **{api.path: api for api in STATELESS},
    RESPONSES: make_responses_api(ResponseFolder(ResponseStore(), "")),
}
"""The APIs for generating text, by their paths."""


async def never_left() -> bool:
    """Return False: the ingress itself cancels the work for a client that has left."""
    return False


@define(eq=False)
class PromptReader:
    """Reads prompts as replicas do. options: of the HTTP server; what the model decides is taken from the replicas."""

    text: Text
    options: EdgeOptions
    _adapted: tuple[str, EdgeOptions] | None = field(default=None, init=False)  # of the identity that was read last

    async def find_keys(self, path: str, body: bytearray, owner: str, facts: ReplicaFacts) -> RouteKeys | None:
        """Return the keys of a request's first prompt; None if it has none. owner: a name for the caller's key.

        facts: of any replica; they decide the identity under which keys are computed.
        """
        options = self._adapt_options(facts)
        caller = ApiClient(never_left, TurnMemory(), owner)
        try:
            value, _ = await parse_body(body, options)
            fields = Fields.from_value(value, "$")
            parsed = await APIS[path].read(fields, options, self.text, caller)
        except (ApiError, TokenizerPanicked):
            return None
        owned = controls.separate_by_owner(parsed.controls, owner)
        prompt = parsed.prompts[0]
        root = compute_root(facts.identity, facts.block_size, owned.salt)
        named = fields.data.get("prompt_cache_key") or owned.compression.session
        return RouteKeys(
            keys=chain_keys(root, pack_tokens(prompt), facts.block_size),
            block_size=facts.block_size,
            tokens=len(prompt),
            session=named if isinstance(named, str) and named else None,
            salt=owned.salt,
        )

    def _adapt_options(self, facts: ReplicaFacts) -> EdgeOptions:
        """Return the options of the HTTP server of a replica, as far as prompts depend on them."""
        if self._adapted is None or self._adapted[0] != facts.identity:
            served = evolve(self.options.model, model_id=facts.model_id, max_ctx=facts.max_ctx, vocab=facts.vocab)
            adapted = evolve(self.options, model=served)
            self._adapted = (facts.identity, adapted)
        return self._adapted[1]
