"""Prompts over a `kill -9`: the prefill stage cold and from a cold disk, the restore against raw reads of its bytes.

`python -m benchmarks.restart [--runs 3] [--tokens 2048,4096,8160]`. Each run starts two servers on one cache folder:
the first computes the prompts and is killed once they are written; then the page cache forgets the files, and the
second one is asked for the same. A short prompt before warms up what is only done once in a process, in both. The
device's raw rate is measured in the same run: the same files, forgotten again, read with preadv.

Answers must have the same tokens and log-probabilities, and the row of logits behind the prompt the same digest: the
servers are ours but for two functions that write things down (`python -m benchmarks.restart serve FILE ...`): that
digest, and the processor time that the whole process took while a restore was under way (`cpu_ms`).

`--against CHECKOUT`: the servers of another checkout take turns with ours, run by run, and both are shown.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.arguments import benchmark_parser
from benchmarks.cold import forget, read_raw
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table

ROOT = Path(__file__).parents[1]
CPU = ".cpu"
STAGES = ("LookingUp", "Restoring", "Prefilling")


def write_down(file: str, line: str) -> None:
    with Path(file).open("a", encoding="ascii") as opened:
        opened.write(line + "\n")


def serve(digests: str, words: Sequence[str]) -> None:
    """`rekindle serve`, with a digest of the first row of all logits appended to a file."""
    from adapters.models.decoder.dense_shard import DenseShard  # noqa: PLC0415 - only this process needs them
    from adapters.models.kernels.step import Step  # noqa: PLC0415
    from adapters.transfer.restorer import Restorer  # noqa: PLC0415
    from engine.__main__ import main as rekindle  # noqa: PLC0415

    logits, restore = DenseShard.logits, Restorer.restore

    async def timed(restorer: Restorer, *about: Any) -> Any:
        before = time.process_time()
        outcome = await restore(restorer, *about)
        write_down(digests + CPU, f"{1e3 * (time.process_time() - before):.3f}")
        return outcome

    def digested(shard: DenseShard, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(shard, step, hidden)
        write_down(digests, blake2b(found[0].cpu().numpy().tobytes(), digest_size=16).hexdigest())
        return found

    DenseShard.logits = digested  # type: ignore[assignment, method-assign]
    Restorer.restore = timed  # type: ignore[assignment, method-assign]
    sys.argv = ["rekindle", "serve", *words]
    rekindle()


@contextmanager
def server(tree: Path, digests: Path, *words: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [sys.executable, str(tree / "benchmarks" / "restart.py"), "serve", str(digests), "--port", "0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        with httpx.Client(base_url=found[0], timeout=600) as client:
            yield client, process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def ask(client: httpx.Client, prompt: Sequence[int], digests: Path) -> dict[str, Any]:
    """The answer, with the digest of the logits that its first token was picked from."""
    before = len(lines(digests))
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "logprobs": 5}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return {**answer, "logits": lines(digests)[before]}


def loading_ms(client: httpx.Client) -> float:
    """Return the milliseconds of all restores so far, by the store's own account. They are a part of the time in
    Restoring.
    """
    restores: dict[str, dict[str, float]] = client.get("/props").json()["full_cache"]["restores"]
    return 1e3 * sum(one["seconds"] for one in restores.values())


def lines(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").splitlines() if file.exists() else []


def prefill_ms(answer: dict[str, Any]) -> float:
    stages: dict[str, float] = answer["rekindle"]["stages_ms"]
    return sum(stages.get(stage, 0.0) for stage in STAGES)


def wait_until_written(client: httpx.Client, more_than: int) -> None:
    """Until there are more entries than that, and no more come."""
    entries = -1
    while True:
        cache = client.get("/props").json()["full_cache"]
        if cache["entries"] == entries > more_than and not cache["queued_bytes"]:
            return
        entries = cache["entries"]
        time.sleep(0.3)


def prompts(sizes: Sequence[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(16, 4000) for _ in range(size)] for size in sizes]


def one_run(
    tree: Path, folder: Path, codec: str, sizes: Sequence[int], seed: int, *, threads: str, kept: str = "auto"
) -> list[dict[str, Any]]:
    words: tuple[str, ...] = (
        "--kv-cache-dir",
        str(folder),
        "--kv-cache-codec",
        codec,
        "--host-cache-budget",
        "0",
        "--threads",
        threads,
    )
    words += () if kept == "auto" else ("--kv-dtype", kept)
    asked, warm_up = prompts(sizes, seed), prompts([100], seed + 1)[0]
    cold, groups, digests = [], [], folder.with_name("logits")
    with server(tree, digests, *words) as (client, process):
        ask(client, warm_up, digests)
        for prompt in asked:
            before = set(folder.glob("*.zst"))
            cold.append(ask(client, prompt, digests))
            wait_until_written(client, len(before))
            groups.append(sorted(set(folder.glob("*.zst")) - before))
        process.kill()
        process.wait(30)
    forget([file for files in groups for file in files])
    rows = []
    with server(tree, digests, *words) as (client, _):
        ask(client, warm_up, digests)
        for size, prompt, files, first in zip(sizes, asked, groups, cold, strict=True):
            spent = loading_ms(client)
            hit = ask(client, prompt, digests)
            assert hit["rekindle"]["tier"] == "disk", hit["rekindle"]
            assert hit["choices"] == first["choices"], "not the same tokens and log-probabilities"
            assert hit["logits"] == first["logits"], "not the same logits"
            forget(files)
            read, seconds = read_raw(files)
            restoring = hit["rekindle"]["stages_ms"]["Restoring"]
            rows.append(
                {
                    "tree": "this" if tree == ROOT else "other",
                    "rows": kept,
                    "codec": codec,
                    "tokens": size,
                    "restored": hit["rekindle"]["restored_tokens"],
                    "cold_ms": prefill_ms(first),
                    "hit_ms": prefill_ms(hit),
                    "ratio": prefill_ms(first) / prefill_ms(hit),
                    "restoring_ms": restoring,
                    "loading_ms": loading_ms(client) - spent,
                    "cpu_ms": float(lines(digests.with_name(digests.name + CPU))[-1]),
                    "MB": read / 1e6,
                    "restore_MB/s": read / restoring / 1e3,
                    "raw_MB/s": read / seconds / 1e6,
                    "of_raw": read / restoring / 1e3 / (read / seconds / 1e6),
                    "logits": hit["logits"][:8],
                }
            )
    return rows


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tree"], row["rows"], row["codec"], row["tokens"]), []).append(row)
    return [
        {name: one if isinstance(one, str) else median([row[name] for row in group]) for name, one in group[0].items()}
        for group in groups.values()
    ]


def make_figures(rows: list[dict[str, Any]]) -> list[Figure]:
    """Divide cold by hit, which must be 48 at 8,160 tokens. Stored files must be read at 0.85 of the disk's speed."""
    found = list[Figure]()
    for row in (row for row in rows if row["tree"] == "this"):
        goal = Goal(at_least=48) if row["tokens"] == 8160 else None
        subject = f"demo, codec {row['codec']}, cold over after kill -9"
        found.append(Figure("restart", subject, str(row["tokens"]), "x", row["ratio"], goal=goal))
    for row in (row for row in rows if row["codec"] == "store" and row["tree"] == "this"):
        what, goal = "demo, stored files, restored at, of the disk's speed", Goal(at_least=0.85)
        found.append(Figure("restart", what, str(row["tokens"]), "x", row["of_raw"], goal=goal))
    return found


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3:])
        return 0
    parser = benchmark_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", default="2048,4096,8160")
    parser.add_argument("--codecs", default="store,zstd")
    parser.add_argument("--kv-dtypes", default="auto", help="as --kv-dtype has them, in turn")
    parser.add_argument("--threads", default="0")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is to be measured")
    parser.add_argument(
        "--against", type=Path, default=None, help="another checkout, whose servers take turns with ours"
    )
    given = parser.parse_args()
    trees = [ROOT] if given.against is None else [ROOT, given.against.resolve()]
    sizes, rows = [int(size) for size in given.tokens.split(",")], list[dict[str, Any]]()
    for run in range(given.runs):
        for codec in given.codecs.split(","):
            for tree, kept in product(trees if run % 2 else trees[::-1], given.kv_dtypes.split(",")):
                how = {"threads": given.threads, "kept": kept}
                with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                    rows += one_run(tree, Path(folder) / "kv", codec, sizes, 100 * run, **how)
    found = medians(rows)
    print_table(
        "Prefill stage cold and after kill -9 with a cold page cache; medians, answers and logits identical", found
    )
    publish(given, "restart", {"medians": found, "runs": rows}, make_figures(found), "cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
