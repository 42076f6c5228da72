"""Builds the options of the HTTP edge from those of the server and what was loaded."""

from __future__ import annotations

import time
from hashlib import blake2b

from adapters.http.edge_options import (
    AccessOptions,
    CompressionDefaults,
    EdgeModel,
    EdgeOptions,
    EdgeTimes,
    RequestDefaults,
    RequestLimits,
)
from adapters.text.model_text import Text
from engine import __version__
from engine.loading.load_target import LoadedModel
from engine.settings.options import Options


def build_edge_options(options: Options, target: LoadedModel, text: Text) -> EdgeOptions:
    """Return the options of the HTTP edge: ratios in thousandths, and the largest body in bytes instead of MiB.

    text: as `Text.check` has left it. `serve` calls this once, when the model is loaded.
    """
    compression = options.compression
    http = options.http
    return EdgeOptions(
        EdgeModel(
            target.model_id,
            target.settings.max_context,
            target.checkpoint.config.vocab_size,
            aliases=options.model.alias,
            any_model=options.model.any_model,
            mode=target.mode,
            numerics=target.numerics.build_report(),
            details=target.details,
            created=int(time.time()),
            version=__version__,
            identity=target.identity,
            text_digest=digest_text(text),
        ),
        RequestDefaults(
            text.sampling,
            target.scope,
            target.has_disk,
            CompressionDefaults(
                compression.prefill_compression,
                compression.prefill_threshold,
                round(compression.prefill_keep_ratio * 1000),
                compression.keep_ratio_curve,
                target.settings.scorer_max_tokens,
                freeze=target.freezes,
            ),
            http.stabilize,
        ),
        AccessOptions(http.api_key, (http.host, *http.allow_host), http.allow_origin),
        RequestLimits(http.max_body << 20, max_jobs=target.settings.serving_slots + http.max_queue),
        EdgeTimes(request_timeout_s=http.request_timeout),
    )


def digest_text(text: Text) -> str:
    """Return 16 hex digits over what turns messages into a prompt and tokens into an answer, besides the tokenizer.

    The tokenizer is left out: its tokens belong to the weights, whose digest the identity has.
    """
    template = None if text.template is None else text.template.source
    parts = template, text.calls, text.reasoning
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
