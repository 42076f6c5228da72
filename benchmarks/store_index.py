"""Measures how long the disk index takes to be ready with 10,000 entries: from its journal, from the files without a
journal, and after a `kill -9` in the middle of writing, until the first hit is there too. With --served that server is
`rekindle serve` with the demo, its own runs among 10,000 of another model, and the hit is a request over HTTP.

`python -m benchmarks.store_index [--entries 10000] [--runs 5] [--served]`. An entry is a run of eight blocks of 64
tokens.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch

from adapters.sequence_layout import RowSpec
from adapters.store import index_journal
from adapters.store.block_index import Entry
from adapters.store.block_keys import chain_keys, compute_root, pack_tokens
from adapters.store.disk.disk_tier import DiskTier
from adapters.store.files import seekable
from adapters.store.files.file_format import Layout, Run, encode_run, format_name
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.host_tier import HostTier
from adapters.store.lease import Miss
from adapters.store.open_store import create_index, open_disk
from adapters.store.slab_memory import Buffer
from adapters.store.store import Store
from adapters.store.tier import read_run
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import ask, server, wait_until_written
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table

BLOCK_SIZE, TOKENS = 64, 512
LAYOUT = Layout("ab" * 16, BLOCK_SIZE, RowSpec(("layers.0.k", "layers.0.v"), 1, 1, "BF16"))


def fill(folder: Path, wanted: int) -> list[Entry]:
    """Small but whole files: their rows hold next to nothing."""
    folder.mkdir(mode=0o700)
    entries, codec, parent = list[Entry](), seekable.create_compressor(-5), compute_root(LAYOUT.identity, BLOCK_SIZE)
    data = bytes(TOKENS * LAYOUT.token_bytes)
    for handle in range(1, wanted + 1):
        tokens = pack_tokens(range(handle, handle + TOKENS))
        run = Run(0, parent, chain_keys(parent, tokens, BLOCK_SIZE), tokens)
        content = b"".join(encode_run(run, LAYOUT, data, codec))
        (folder / format_name(run.keys[-1], handle)).write_bytes(content)
        entries.append(Entry(handle, 0, parent, run.keys, tokens, len(content), parent, last_turn=handle))
    return entries


def forget(folder: Path, entries: list[Entry]) -> None:
    """Remove the files that were written since."""
    known = {format_name(entry.keys[-1], entry.handle) for entry in entries}
    for file in folder.glob("*.safetensors.zst"):
        if file.name not in known:
            file.unlink()


def start(folder: Path, *, known: int) -> tuple[float, float]:
    """(milliseconds until the server could go on, until every entry is known)"""
    begin = time.perf_counter()
    disk = open_disk(LAYOUT, PrivateFolder.open(folder), threading.RLock(), budget=1 << 40)
    ready = time.perf_counter()
    while disk.has_unindexed_files:
        time.sleep(0.001)
    scanned = time.perf_counter()
    assert len(disk.index) == known
    disk.close()
    return (ready - begin) * 1e3, (scanned - begin) * 1e3


def kill_writer(folder: Path) -> None:
    """A process that has the folder open, and writes to it, is killed while it does."""
    words = [sys.executable, "-c", f"from benchmarks import store_index; store_index.write({str(folder)!r})"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        time.sleep(0.2)
        writer.kill()


def write(folder: str) -> None:
    """Write new runs until the process is killed."""
    store = open_store(Path(folder))
    print("writing", flush=True)
    for number in count():
        tokens = tuple(range(10**6 + number, 10**6 + number + TOKENS))
        for run in store.find_missing_runs(tokens):
            store.keep_run(run, Buffer(torch.zeros(TOKENS * LAYOUT.token_bytes, dtype=torch.uint8)))
        while store.lower_tiers and store.lower_tiers[0].queued_bytes:
            time.sleep(0.0001)


def open_store(folder: Path) -> Store[DiskTier]:
    lock = threading.RLock()
    return Store(
        LAYOUT,
        (HostTier(create_index(LAYOUT, 0)), open_disk(LAYOUT, PrivateFolder.open(folder), lock, budget=1 << 40)),
        lock,
    )


def recover(folder: Path) -> tuple[float, float]:
    """(milliseconds until the server could go on, until the rows of the first hit are there)"""
    begin = time.perf_counter()
    store = open_store(folder)
    ready = time.perf_counter()
    found = store.find_prefix((*range(1, 1 + TOKENS), 0), 0)
    assert not isinstance(found, Miss), found
    assert store.lower_tiers
    (part,) = found[1].parts
    with ThreadPoolExecutor(2) as workers:
        anyio.run(read_run, store.lower_tiers[0], part.entry, store.memory, workers)
    served = time.perf_counter()
    store.release(found[0])
    store.close()
    return (ready - begin) * 1e3, (served - begin) * 1e3


def measure_served_restart(folder: Path, entries: list[Entry], home: Path) -> dict[str, float]:
    """Milliseconds that the log tells of the index, seconds until the server is ready, and of its first request."""
    prompt = [random.Random(1).randrange(16, 4000) for _ in range(1024)]
    words = ("--kv-cache-dir", str(folder), "--kv-cache-budget", "4096")
    with server("kept", words, home) as (client, process, _):
        cold, cold_s = ask(client, prompt)
        wait_until_written(client, len(entries))
        threading.Timer(0.2, process.kill).start()  # while more is computed, or written
        with suppress(httpx.HTTPError):
            ask(client, prompt[::-1])
        process.kill()
        process.wait(30)
    with server("kept", words, home) as (client, _, ready_s):
        hit, hit_s = ask(client, prompt)
    assert hit["rekindle"]["tier"] == "disk", hit["rekindle"]
    assert hit["choices"] == cold["choices"]
    known = re.findall(r"found (\d+) cache entries on disk in (\d+) ms", (home / "server.log").read_text())[-1]
    assert int(known[0]) > len(entries)
    return {"runs": int(known[0]), "index_ms": int(known[1]), "ready_s": ready_s, "cold_s": cold_s, "hit_s": hit_s}


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--served", action="store_true")
    given = parser.parse_args()
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        entries = fill(folder, given.entries)
        for _ in range(given.runs):
            if given.served:
                (folder / index_journal.NAME).write_bytes(b"".join(index_journal.encode_snapshot(entries)))
                rows.append(measure_served_restart(folder, entries, Path(name)))
                forget(folder, entries)
                continue
            (folder / index_journal.NAME).write_bytes(b"".join(index_journal.encode_snapshot(entries)))
            ready, _ = start(folder, known=given.entries)
            (folder / index_journal.NAME).unlink()
            without, scanned = start(folder, known=given.entries)
            kill_writer(folder)
            after, hit = recover(folder)
            rows.append(
                {
                    "journal_ms": ready,
                    "no_journal_ready_ms": without,
                    "no_journal_all_known_ms": scanned,
                    "killed_ready_ms": after,
                    "killed_first_hit_ms": hit,
                }
            )
            forget(folder, entries)
    medians = {key: median([row[key] for row in rows]) for key in rows[0]}
    print_table(f"{given.entries} entries (goal: ready within 250 ms)", [*rows, medians])
    key = "index_ms" if given.served else "journal_ms"
    goal, at = Goal(at_most=250), f"{given.entries:,} entries{', served' if given.served else ''}"
    figures = [Figure("restart", "index of the cache ready", at, "ms", medians[key], goal=goal)]
    name = "store_index-served" if given.served else "store_index"
    publish(given, name, {"runs": rows, "median": medians}, figures, "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
