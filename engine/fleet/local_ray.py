"""Starts a Ray of its own for a fleet on one machine, and Ray Serve's proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve

from adapters.processors import count_processors
from engine.settings.options import Options

MARK = "rekindle_local"  # a resource that only such a Ray has
OBJECT_STORE_BYTES = 80 << 20  # about the least that Ray accepts: no request passes through its object store


@contextmanager
def run_local_ray(options: Options) -> Iterator[None]:
    """Run Ray and Ray Serve on this machine for as long as the block takes. options: where the proxy listens.

    `prepare_environment` must have been called before Ray was imported.
    """
    ray.init(
        address="local",
        num_cpus=count_processors(),
        resources={MARK: 1},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": options.http.host, "port": options.http.port})
        yield
        serve.shutdown()
    finally:
        ray.shutdown()
