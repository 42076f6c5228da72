"""What the edge needs to know, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from effects.compression import Mode
from effects.job import Sampling
from effects.scope import Scope

CONTEXTS = 20  # that a prompt may have before it is scored: at the default ratio, what is kept of more fits none

Points = tuple[tuple[int, int], ...]


@frozen
class CompressionDefaults:
    """What the server was started with. keep, curve: thousandths, and those by tokens of the prompt, ascending; the
    curve decides where there is one. drafter: tokens of a prompt that it scores at most; 0: there is none.  freeze:
    messages that have aged are shortened once and for all.
    """

    mode: Mode = "off"
    threshold: int = 32_000
    keep: int = 50
    curve: Points = ()
    drafter: int = 0
    freeze: bool = False


@frozen
class EdgeOptions:
    """Everything is per server; sizes in bytes, times in seconds.

    model_id, aliases: what `model` in requests may say; any_model: anything.
    max_ctx: tokens of prompt and answer together.
    vocab: token ids are below it.  sampling: for requests that do not say (its seed and logprobs are not used);
    OpenAI's, unless the checkpoint says otherwise.
    scope: of the prefix cache, for requests that do not say.
    disk: is there a disk tier? A request cannot turn it on.
    stabilize: `known`: what agents change in every prompt is left out or moved, if a request does not say `off`.
    numerics: shown as `rekindle.numerics`; `mode` is `exact` or `fast`.
    allowed_hosts: names besides the loopback ones that a Host header may have; `*` accepts any, `0.0.0.0` or `::` any
    IP address.
    allowed_origins: `scheme://host[:port]` of pages that may call from a browser; `*`: any page.
    keepalive_s: seconds of silence before a stream says that the server is alive.  sign_of_life_s: seconds of nothing
    but pings before a stream of Messages has an event that clients count.
    retry_after_s: what a server that is not ready says.
    """

    model_id: str
    max_ctx: int
    vocab: int
    aliases: tuple[str, ...] = ()
    any_model: bool = False
    sampling: Sampling = field(factory=lambda: Sampling(temperature=1))
    scope: Scope = field(factory=Scope)
    disk: bool = True
    compression: CompressionDefaults = field(factory=CompressionDefaults)
    stabilize: Literal["off", "known"] = "known"
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    numerics: Mapping[str, Any] = field(factory=lambda: {"mode": "exact"})
    model_info: Mapping[str, Any] = field(factory=dict)  # n_params, size, dtype ...: /v1/models shows them as `meta`
    created: int = 0  # when the model was made or loaded, Unix time
    version: str = "0"
    max_body: int = 32 << 20
    max_choices: int = 128  # OpenAI's
    max_prompts: int = 64
    max_jobs: int = 512  # that one request makes, prompts times choices: no more than slots and queue hold
    body_timeout_s: float = 30
    request_timeout_s: float | None = 600
    write_timeout_s: float = 60
    keepalive_s: float = 5
    sign_of_life_s: float = 120
    retry_after_s: int = 1

    @property
    def longest(self) -> int:
        """Prompts of so many tokens are refused, whatever is in them."""
        frozen = CONTEXTS * self.max_ctx if self.compression.freeze else 0  # whose messages are scored one by one
        return max(self.max_ctx, self.compression.drafter + 1, frozen)

    @property
    def counted(self) -> int:
        """Tokens of a prompt that are counted before it is refused as having at least so many: twice the context, or
        what a drafter could score.
        """
        return max(2 * self.max_ctx, self.longest)

    @property
    def names(self) -> tuple[str, ...]:
        """All that the model is called by, each once."""
        return tuple(dict.fromkeys((self.model_id, *self.aliases)))
