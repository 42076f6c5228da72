"""Nothing is left of a request that has ended: the same work again and again adds no object and no entry anywhere."""

from __future__ import annotations

import gc
import json
import logging
import os
import platform
import subprocess
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import pytest

from adapters.http.answer import cache_misses
from engine.loading.background_load import begin_load
from engine.loading.load_text import begin_text
from engine.serving.serve import LoadingGate, listen, serve_model
from engine.settings.options import Options, build_options
from engine.settings.output.start_progress import StartProgress
from states.speculation_control import UNIT, estimate_chain_gain
from tests.importing import importing
from tests.plain_http import NO_TLS

CONTAINERS = (dict, set, list, deque)
WARM, SPANS, STEPS = 3, 4, 8
PROPOSALS = 15  # of the demo's draft
TALK = [{"role": "user", "content": "Count to a thousand."}]


def left() -> str:
    """Return the counts of all objects by type, and how much is in the containers, as JSON, which adds nothing to them.

    The collector does not list plain values, nor a dict that holds nothing else: its owner knows it.
    """
    gc.unfreeze()
    for _ in range(3):
        gc.collect()
    objects = gc.get_objects()
    containers = {id(one): one for one in objects if issubclass(type(one), CONTAINERS)}
    for owner in objects:
        containers |= {id(one): one for one in gc.get_referents(owner) if type(one) is dict}
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in objects)
    for container in containers.values():
        found[f"in a {type(container).__qualname__}"] += len(cast("Sized", container))
    return json.dumps(found)


@asynccontextmanager
async def served(options: Options) -> AsyncIterator[httpx.AsyncClient]:
    """All that `rekindle serve` runs, in this process."""
    gate, stop = LoadingGate(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        serving = await tasks.start(listen, options, gate)
        with StartProgress() as progress:
            begun = {"beginning": begin_load(options, progress), "reading": begin_text(options.model)}
            tasks.start_soon(partial(serve_model, options, gate, serving, stop, progress=progress, **begun))
            while gate.app is None:  # noqa: ASYNC110 - no event marks it
                await anyio.sleep(0.1)
            url = f"http://{serving.host}:{serving.port}"
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, verify=NO_TLS) as client:
                yield client
            stop.set()


async def ask(client: httpx.AsyncClient) -> None:
    """Six requests as they come: two answers, one that is left, one that is wrong, one that is nowhere, one look."""

    async def post(path: str, body: dict[str, Any], status: int) -> None:
        answer = await client.post(path, json=body)
        assert answer.status_code == status, answer.text

    await post("/v1/chat/completions", {"messages": TALK, "max_tokens": 4, "temperature": 0}, 200)
    await post("/v1/completions", {"prompt": [*range(10, 330)], "max_tokens": 2, "temperature": 0}, 200)
    body = {"messages": TALK, "max_tokens": 400, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await post("/v1/chat/completions", {"messages": []}, 400)
    assert (await client.get("/nowhere")).status_code == 404
    assert (await client.get("/metrics")).status_code == 200
    while any(slot["is_processing"] for slot in (await client.get("/slots")).json()):  # noqa: ASYNC110 - no event marks it
        await anyio.sleep(0.01)


@pytest.mark.timeout(300)
@pytest.mark.long
async def test_requests_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cache_misses, "MAX_MISSES", WARM
    )  # the last ones that are shown: as many as there are before it is counted
    for width in range(PROPOSALS + 1):  # a table that fills as chances come up, by where the request that is left stops
        for each in range(UNIT + 1):
            estimate_chain_gain(width, each)
    logging.disable()  # what pytest keeps of each line is not ours
    try:
        options = build_options(port=0, kv_cache_dir=tmp_path / "kv", trace=tmp_path / "trace.jsonl.zst", slots=2)
        async with served(options) as client:
            for _ in range(WARM):
                await ask(client)
            listings = [left()]
            for _ in range(SPANS):
                for _ in range(STEPS):
                    await ask(client)
                listings.append(left())
    finally:
        logging.disable(logging.NOTSET)
    counts = [json.loads(one) for one in listings]
    spans = [{kind: after[kind] - before.get(kind, 0) for kind in after} for before, after in pairwise(counts)]
    # Every time: asyncio's timers that were cancelled go by the hundred.
    grown = {kind: [span.get(kind, 0) for span in spans] for kind in spans[-1]}
    assert not {kind: by for kind, by in grown.items() if min(by) >= STEPS}


def test_what_the_cpu_kernels_prepare_for_shapes_is_bounded() -> None:
    """oneDNN keeps something for each shape it has seen: one that was not seen for long is prepared anew."""
    capacity = 128
    script = f"""
import engine, torch
from adapters.models.kernels.cpu.onednn import multiply
weight = torch.zeros(64, 64)
with torch.inference_mode():
    for rows in (*range(1, {capacity} + 2), {capacity} + 1, 1):
        multiply(torch.zeros(rows, 64), weight)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ONEDNN", "DNNL"))}
    environment |= {**importing(Path(__file__).parents[2]), "ONEDNN_VERBOSE": "profile_create"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    made = [line for line in done.stdout.splitlines() if ",create:cache_" in line and "ic64oc64" in line]
    if not made:
        pytest.skip("no oneDNN here")
    assert ["cache_miss" in line for line in made[-2:]] == [False, True]
    assert sum("cache_miss" in line for line in made) == capacity + 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_threads_share_what_was_freed() -> None:
    """Counted as glibc tells it: arenas, of which each thread would have its own."""
    script = """
import ctypes, os, re, tempfile, threading
from adapters.process_memory import limit_arenas
limit_arenas()
met = threading.Barrier(17)
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def work():
    libc.malloc(1000)
    met.wait(30)
    met.wait(30)
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads: thread.start()
met.wait(30)
with tempfile.NamedTemporaryFile() as told:
    file = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(told.read().count(b"<heap "))
met.wait(30)
"""
    environment = {key: value for key, value in os.environ.items() if key not in {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}}
    environment |= importing(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 4
