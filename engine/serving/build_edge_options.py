"""Builds the options of the HTTP edge from those of the server and what was loaded."""

from __future__ import annotations

import time

from adapters.http.edge_options import CompressionDefaults, EdgeOptions
from effects.job import Sampling
from engine import __version__
from engine.loading.load_target import LoadedModel
from engine.settings.options import Options


def build_edge_options(options: Options, target: LoadedModel, sampling: Sampling) -> EdgeOptions:
    """Return the options of the HTTP edge."""
    return EdgeOptions(
        model_id=target.model_id,
        max_ctx=target.settings.max_context,
        vocab=target.checkpoint.config.vocab_size,
        api_keys=options.http.api_key,
        aliases=options.model.alias,
        any_model=options.model.any_model,
        allowed_origins=tuple(map(str.lower, options.http.allow_origin)),
        allowed_hosts=(options.http.host.lower(), *map(str.lower, options.http.allow_host)),
        numerics=target.numerics_facts,
        model_info=target.model_info,
        sampling=sampling,
        scope=target.scope,
        disk=target.has_disk,
        compression=CompressionDefaults(
            options.compression.prefill_compression,
            options.compression.prefill_threshold,
            round(options.compression.prefill_keep_ratio * 1000),
            options.compression.keep_ratio_curve,
            target.settings.scorer_max_tokens,
            freeze=target.freezes,
        ),
        stabilize=options.http.stabilize,
        created=int(time.time()),
        version=__version__,
        max_body=options.http.max_body << 20,
        max_jobs=target.settings.slots + options.http.max_queue,
        request_timeout_s=options.http.request_timeout,
    )
