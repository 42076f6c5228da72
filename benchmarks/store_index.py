"""How long the disk index takes to be ready with 10,000 entries, from its journal and, without one, from the files.

`python -m benchmarks.store_index [--entries 10000] [--runs 5]`. An entry is a run of eight blocks of 64 tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from adapters.store import journal, seekable
from adapters.store.blocks import chain, pack, root
from adapters.store.folder import Folder
from adapters.store.format import Layout, Rows, Run, encode, file_name
from adapters.store.index import Entry
from adapters.store.opening import open_disk
from benchmarks.report import machine, median, raw, table

GRAIN, TOKENS = 64, 512
LAYOUT = Layout("ab" * 16, GRAIN, Rows(("layers.0.k", "layers.0.v"), 1, 1, torch.bfloat16))


def fill(folder: Path, count: int) -> list[Entry]:
    """Small but whole files: their rows hold next to nothing."""
    folder.mkdir(mode=0o700)
    entries, codec, parent = list[Entry](), seekable.compressor(-5), root(LAYOUT.identity, GRAIN)
    data = bytes(TOKENS * LAYOUT.token_bytes)
    for handle in range(1, count + 1):
        tokens = pack(range(handle, handle + TOKENS))
        run = Run(0, parent, chain(parent, tokens, GRAIN), tokens)
        content = b"".join(encode(run, LAYOUT, data, codec))
        (folder / file_name(run.keys[-1], handle)).write_bytes(content)
        entries.append(Entry(handle, 0, parent, run.keys, tokens, len(content), parent, used=handle))
    return entries


def start(folder: Path, *, count: int) -> tuple[float, float]:
    """(milliseconds until the server could go on, until every entry is known)"""
    begin = time.perf_counter()
    disk = open_disk(LAYOUT, Folder.open(folder), threading.RLock(), budget=1 << 40)
    ready = time.perf_counter()
    while disk.scanning:
        time.sleep(0.001)
    known = time.perf_counter()
    assert len(disk.index) == count
    disk.close()
    return (ready - begin) * 1e3, (known - begin) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        entries = fill(folder, given.entries)
        for _ in range(given.runs):
            (folder / journal.NAME).write_bytes(b"".join(journal.snapshot(entries)))
            ready, _ = start(folder, count=given.entries)
            (folder / journal.NAME).unlink()
            without, scanned = start(folder, count=given.entries)
            rows.append({"journal_ms": ready, "no_journal_ready_ms": without, "no_journal_all_known_ms": scanned})
    medians = {key: median([row[key] for row in rows]) for key in rows[0]}
    table(f"{given.entries} entries (goal: ready within 250 ms)", [*rows, medians])
    raw("store_index", {"runs": rows, "median": medians, "machine": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
