"""Measures the processor time per GiB of snapshot files that are written: through aiofiles, and by one thread that
makes every call itself.

`python -m benchmarks.write_files [--mib 256] [--pairs 9] [--folder DIR] [--record]`. Both ways write the same runs of
rows in turn: 4 MiB as on a processor, 32 MiB as on a GPU. Each pair of measurements gives one ratio, and the median of
the ratios counts. Processor time is that of the whole process, kernel included. `write` is writing alone; `snapshot`
also compresses the rows, as the store does for every file.

On two cores of an AMD EPYC (2026-11-28, a busy machine, 96 MiB a measurement, 7 pairs), aiofiles by one thread:
snapshots of 4 MiB 1.044 and 0.923 s/GiB, median ratio 1.13 (1.05 to 1.15); of 32 MiB 1.378 and 1.307 s/GiB, 1.06 (0.96
to 1.13). Writing alone 1.22 and 1.15. With a pool of one thread in place of `SameThreadExecutor`: 1.25 and 1.04.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from adapters.sequence_layout import RowSpec
from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files.codec import create_compressor
from adapters.store.files.file_format import Layout, Run, encode_run, format_name
from adapters.store.files.private_folder import PrivateFolder
from adapters.store.files.same_thread_executor import SameThreadExecutor
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table

BLOCK_SIZE = 64
NAMES = tuple(f"layers.{layer}.{name}" for layer in range(8) for name in "kv")
LAYOUT = Layout("ab" * 16, BLOCK_SIZE, RowSpec(NAMES, 4, 32, "BF16"))  # 4 KiB a token
RUN_MIB = (4, 32)

# Writes one file under each of the names, with what the function returns.
Write = Callable[[Sequence[str], Callable[[], Sequence[bytes]]], None]


def make_run(size: int) -> tuple[Run, bytes]:
    """Return a run whose rows are `size` bytes, and rows that no codec makes smaller."""
    tokens = pack_tokens(range(size // LAYOUT.token_bytes))
    root = LAYOUT.compute_root("rows")
    run = Run(0, root, chain_keys(root, tokens, BLOCK_SIZE), tokens)
    return run, np.random.default_rng(size).bytes(size)


def measure(write: Write, folder: PrivateFolder, size: int, total: int, *, compress: bool) -> float:
    """Return seconds of processor time per GiB for `total` bytes in files of `size` bytes; the files are removed."""
    run, rows = make_run(size)
    codec = create_compressor("store")
    parts = encode_run(run, LAYOUT, rows, codec)
    names = [format_name(run.keys[-1], number) for number in range(max(1, total // size))]
    started = time.process_time()
    write(names, lambda: encode_run(run, LAYOUT, rows, codec) if compress else parts)
    took = time.process_time() - started
    for name in names:
        folder.remove(name)
    return took * (1 << 30) / (len(names) * size)


def compare(
    ways: dict[str, Write], folder: PrivateFolder, size: int, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return one row for writing alone and one with compression, each with the median ratio of all pairs."""
    rows = list[dict[str, Any]]()
    for compress in (False, True):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for pair in range(given.pairs + 1):
            order = list(ways) if pair % 2 else list(reversed(ways))
            for name in order:
                took = measure(ways[name], folder, size, given.mib << 20, compress=compress)
                if pair:  # the first pair only warms up
                    times[name].append(took)
        ratios = [new / old for old, new in zip(times["one thread"], times["aiofiles"], strict=True)]
        rows.append(
            {
                "MiB a file": size >> 20,
                "what": "snapshot" if compress else "write",
                **{f"{name}, s/GiB": median(values) for name, values in times.items()},
                "ratio": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="content that each measurement writes")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as made,
        ThreadPoolExecutor(1, "store-writer") as writer,
        SameThreadExecutor() as executor,
        asyncio.Runner() as runner,
    ):
        folder = PrivateFolder.open(Path(made) / "kv")

        def write_directly(names: Sequence[str], make_parts: Callable[[], Sequence[bytes]]) -> None:
            for name in names:
                folder.write_file(name, make_parts())

        async def write_all(names: Sequence[str], make_parts: Callable[[], Sequence[bytes]]) -> None:
            for name in names:
                await folder.write_async(name, make_parts(), executor)

        ways: dict[str, Write] = {
            "one thread": write_directly,
            "aiofiles": lambda names, make_parts: runner.run(write_all(names, make_parts)),
        }
        # Not on the main thread: the store does not write there, and `asyncio.Runner` sets signal handlers there.
        compared = [writer.submit(compare, ways, folder, size << 20, given) for size in RUN_MIB]
        rows = [row for one in compared for row in one.result()]
        folder.close()
    print_table("processor time of writing snapshot files", rows)
    what = "processor time of writing files through aiofiles"
    figures = [
        Figure("service", what, f"{row['MiB a file']} MiB", "x", row["ratio"], goal=Goal(at_most=1.15))
        for row in rows
        if row["what"] == "snapshot"
    ]
    publish(given, "write_files", {"mib": given.mib, "pairs": given.pairs, "rows": rows}, figures)


if __name__ == "__main__":
    main()
