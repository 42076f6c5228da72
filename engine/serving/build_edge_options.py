"""Builds the options of the HTTP edge from those of the server and what was loaded."""

from __future__ import annotations

import time

from adapters.http.edge_options import (
    AccessOptions,
    CompressionDefaults,
    EdgeModel,
    EdgeOptions,
    EdgeTimes,
    RequestDefaults,
    RequestLimits,
)
from effects.job import Sampling
from engine import __version__
from engine.loading.load_target import LoadedModel
from engine.settings.options import Options


def build_edge_options(options: Options, target: LoadedModel, sampling: Sampling) -> EdgeOptions:
    """Return the options of the HTTP edge."""
    compression = options.compression
    http = options.http
    return EdgeOptions(
        EdgeModel(
            target.model_id,
            target.settings.max_context,
            target.checkpoint.config.vocab_size,
            aliases=options.model.alias,
            any_model=options.model.any_model,
            numerics=target.numerics_facts,
            model_info=target.model_info,
            created=int(time.time()),
            version=__version__,
        ),
        RequestDefaults(
            sampling,
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
        RequestLimits(http.max_body << 20, max_jobs=target.settings.slots + http.max_queue),
        EdgeTimes(request_timeout_s=http.request_timeout),
    )
