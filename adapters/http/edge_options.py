"""The options of the HTTP edge, and its limits."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b
from typing import Literal

from attrs import asdict, field, frozen

from effects.compression import Mode
from effects.job import Sampling
from effects.model_details import ModelDetails, NumericsReport
from effects.scope import Scope

# Contexts that a prompt may fill before it is scored. At the default ratio, what is kept of more fits no context.
MAX_FROZEN_CONTEXTS = 20

Points = tuple[tuple[int, int], ...]


@frozen
class CompressionDefaults:
    """The options of compression that the server was started with.

    keep: thousandths of a prompt that are kept. curve: thousandths by tokens of the prompt, ascending; it decides if
    there is one. max_scored_tokens: tokens of a prompt that the prompt scorer takes at most; 0: there is no scorer.
    freeze: messages that have aged are shortened once and for all.
    """

    mode: Mode = "off"
    threshold: int = 32_000
    keep: int = 50
    curve: Points = ()
    max_scored_tokens: int = 0
    freeze: bool = False


@frozen
class EdgeModel:
    """The model as clients see it.

    * model_id, aliases: what `model` in requests may say. any_model: it may say anything.
    * max_ctx: tokens of prompt and answer together. vocab: token ids are below it.
    * mode: of the numerics; each answer says it as `rekindle.numerics`. numerics: what the probe found, for /props.
    * details: /v1/models shows them in `meta`.
    * created: Unix time at which the model was made or loaded. version: of this server.
    * identity: the digest of weights, configuration, kernels and shapes (`engine/loading/identity.py`). text_digest: of
      the chat template and of how answers are parsed.
    """

    model_id: str
    max_ctx: int
    vocab: int
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    mode: Literal["exact", "fast"] = "exact"
    numerics: NumericsReport | None = None
    details: ModelDetails | None = None
    created: int = 0
    version: str = "0"
    identity: str = ""
    text_digest: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, each once."""
        return tuple(dict.fromkeys((self.model_id, *self.aliases)))


@frozen
class RequestDefaults:
    """The settings of requests that do not name their own.

    * sampling: OpenAI's, unless the checkpoint says otherwise. Its seed and logprobs are not used.
    * scope: of the prefix cache. disk: whether there is a disk tier. A request cannot turn it on.
    * stabilize: with `known`, what agents change in every prompt is left out or moved.
    """

    sampling: Sampling = field(factory=lambda: Sampling(temperature=1))
    scope: Scope = field(factory=Scope)
    disk: bool = True
    compression: CompressionDefaults = field(factory=CompressionDefaults)
    stabilize: Literal["off", "known"] = "known"


def lower_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str.lower, names))


@frozen
class AccessOptions:
    """The clients that may call. Names of hosts and origins are compared in lower case.

    * allowed_hosts: names besides the loopback ones that a Host header may have. `*` accepts any; `0.0.0.0` or `::`
      accepts any IP address.
    * allowed_origins: `scheme://host[:port]` of pages that may call from a browser; `*`: any page.
    """

    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = field(default=(), converter=lower_names)
    allowed_origins: tuple[str, ...] = field(default=(), converter=lower_names)


@frozen
class RequestLimits:
    """The limits of one request. max_body: bytes of its body."""

    max_body: int = 32 << 20
    max_choices: int = 128  # as in OpenAI's API
    max_prompts: int = 64
    max_jobs: int = 512  # jobs of one request, prompts times choices: as many as slots and queue hold


@frozen
class EdgeTimes:
    """The times of a connection in seconds.

    * keepalive_s: silence before a stream says that the server is alive. sign_of_life_s: nothing but pings before a
      stream of Messages has an event that clients count.
    * retry_after_s: what a server that is not ready says.
    """

    body_timeout_s: float = 30
    request_timeout_s: float | None = 600
    write_timeout_s: float = 60
    keepalive_s: float = 5
    sign_of_life_s: float = 120
    retry_after_s: int = 1


@frozen
class EdgeOptions:
    """The options of one server, in groups. A reader that needs one group takes that group."""

    model: EdgeModel
    defaults: RequestDefaults = field(factory=RequestDefaults)
    access: AccessOptions = field(factory=AccessOptions)
    limits: RequestLimits = field(factory=RequestLimits)
    times: EdgeTimes = field(factory=EdgeTimes)

    @cached_property
    def fingerprint(self) -> str:
        """Return OpenAI's `system_fingerprint`, which stands for the backend's configuration.

        Where two servers have the same, they give a request with a seed the same answer: version, weights, numerics,
        template and the defaults that a request may leave open are equal. A restart keeps it, and so do options that
        change no answer, such as those of the cache. It begins with `b`, as builds of llama.cpp do.
        """
        model = self.model
        defaults = asdict(self.defaults.sampling), asdict(self.defaults.compression), self.defaults.stabilize
        facts = repr((model.version, model.identity, model.text_digest, *defaults))
        return f"b{model.version}-{blake2b(facts.encode(), digest_size=4).hexdigest()}"

    @property
    def max_prompt_tokens(self) -> int:
        """The number of tokens from which on prompts are refused, whatever is in them."""
        compression = self.defaults.compression
        # With freezing, messages are scored one by one, so the prompt may be longer than the scorer's limit.
        frozen = MAX_FROZEN_CONTEXTS * self.model.max_ctx if compression.freeze else 0
        return max(self.model.max_ctx, compression.max_scored_tokens + 1, frozen)

    @property
    def max_counted_tokens(self) -> int:
        """The number of tokens of a prompt that are counted before it is refused as having at least this many. It is
        twice the context, or what the prompt scorer takes.
        """
        return max(2 * self.model.max_ctx, self.max_prompt_tokens)
