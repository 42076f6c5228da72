"""Measures a model over HTTP whose layers, or whose draft, are on several devices or in other processes, compared with
a single device.

`python -m benchmarks.split_serve [--shape 8b --folder /dev/shm] [--plans cuda:0 cuda:0,cuda:1] [--tokens 32000]
[--times 3] [--tiers host] [--at-once]`; a model that no card of 141 GB has room for, 169 GB of weights:
`--shape 70b --layers 96 --folder /dev/shm --plans cuda:0,cuda:1 --near 2048 --tokens 8192 --tiers host restart`

Each plan gets one server of one slot. Measured are tokens a second behind a short prompt of `--near` tokens, a long
prompt of `--tokens` tokens cold, and tokens a second behind it. Then comes the same prompt again, `--times` times, by
`--tiers`: from host memory, with another prompt in between; from disk, after others have driven it out of host memory;
or from disk by another server, after a restart. `--at-once` has all plans served side by side, so that only tokens
count. Times of prefill, answers and restores are the server's own. A plan may end in `+draft@DEVICE`; else nothing is
proposed. All plans must answer with the same tokens and log-probabilities, restored ones too: the exit status is 1
where one does not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from adapters import demo
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint
from benchmarks.peer_servers import ROOT, listen_to
from benchmarks.restart import prefill_ms
from benchmarks.results import Figure, Goal, name_shape, publish, slug
from benchmarks.tables import print_table

WAITED = 60.0  # seconds at most for what is kept to be written


def ask(client: httpx.Client, prompt: Sequence[int], answer: int) -> dict[str, Any]:
    body = {"prompt": list(prompt), "max_tokens": answer, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    said: dict[str, Any] = client.post("/v1/completions", json=body).raise_for_status().json()
    return said


def words(answer: Mapping[str, Any]) -> list[Any]:
    """Tokens and their log-probabilities."""
    reported = answer["choices"][0]["logprobs"]
    return [*zip(reported["tokens"], reported["token_logprobs"], strict=True)]


def as_before(said: Sequence[list[Any]]) -> bool:
    """Return whether the restored prompt has the same words as the cold one."""
    _, cold, *again = said
    return all(one == cold[: len(one)] for one in again)


def restores(client: httpx.Client) -> Mapping[str, Mapping[str, float]]:
    reported: dict[str, Any] = client.get("/props").json()
    found: Mapping[str, Mapping[str, float]] = reported["full_cache"]["restores"]
    return found


def wait_for_writes(client: httpx.Client) -> None:
    """Wait until everything that is to be written has been written."""
    until = time.monotonic() + WAITED
    while client.get("/props").json()["full_cache"]["queued_bytes"] and time.monotonic() < until:
        time.sleep(0.1)


def figures(client: httpx.Client, given: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(1)
    sizes = (given.near, *[given.tokens] * 3)
    short, long, *others = ([draw.randrange(300, 3000) for _ in range(size)] for size in sizes)
    ask(client, short[::-1], 8)  # the first one is not measured
    near, cold = ask(client, short, given.answers), ask(client, long, given.answers)
    found: dict[str, Any] = {
        "decode, tok/s": near["timings"]["predicted_per_second"],
        "decode behind all, tok/s": cold["timings"]["predicted_per_second"],
        "prefill of the short one, ms": prefill_ms(near),
        "prefill, ms": prefill_ms(cold),
    }
    said = [words(near), words(cold)]
    for tier in [tier for tier in given.tiers if tier != "restart"]:
        wait_for_writes(client)
        if tier == "disk":
            for prompt in others:  # what is in host memory are these
                ask(client, prompt, 1)
                wait_for_writes(client)
        for number in range(given.times if tier == "host" else 1):
            if tier == "host":
                ask(client, short[::-1], 8)  # what is in the slot is this one
            before, again = restores(client), ask(client, long, 8)
            after, tiers = restores(client), again["rekindle"]["tier"]
            spent = {name: after[name]["seconds"] - before.get(name, {}).get("seconds", 0.0) for name in after}
            which = f"{tier}, {number + 1}"
            found |= {
                f"restore from {which}, ms": 1e3 * spent.get(tier, 0.0),
                f"prefill then ({which}), ms": prefill_ms(again),
                f"tier ({which})": f"{tiers} {again['rekindle'].get('restored_tokens', '')}",
            }
            said.append(words(again))
    wait_for_writes(client)
    shown = client.get("/props").json()["memory"]
    return {**found, "said": said, "shards": shown["shards"], "draft": shown["draft"], "rekindle": near["rekindle"]}


def begun_anew(client: httpx.Client, given: argparse.Namespace) -> dict[str, Any]:
    """Return the first words behind the long prompt after a restart, and the time that they took."""
    draw = random.Random(1)
    _, long = ([draw.randrange(300, 3000) for _ in range(size)] for size in (given.near, given.tokens))
    again = ask(client, long, 8)
    return {
        "prefill then (restart), ms": prefill_ms(again),
        "tier (restart)": f"{again['rekindle']['tier']} {again['rekindle'].get('restored_tokens', '')}",
        "said": words(again),
    }


def host_mib(model: str, tokens: int) -> int:
    """Return MiB of host memory that have room for two such prompts, and not for three."""
    checkpoint = Checkpoint.open(demo.FOLDERS.get(model) or Path(model))
    config, dtype = checkpoint.config, resolve_dtype("auto", checkpoint)
    return 1 + 5 * tokens * config.kv_bytes_per_token(dtype, range(config.num_layers)) >> 21


def measure_server(plan: str, model: str, given: argparse.Namespace, home: Path) -> dict[str, Any]:
    devices, _, draft = plan.partition("+draft@")
    rows = given.tokens + given.answers + 64
    drafted = ("--draft-device", draft) if draft else ("--draft", "none")
    words = ("--target-devices", devices, *drafted, "--slots", "1", "--max-ctx", str(rows), "--kv-cache-dir", str(home))
    words += (
        "--host-cache-budget",
        str(host_mib(model, given.tokens)),
        "--kv-cache-codec",
        "store",
        "--kv-cache-min-tokens",
        "64",
    )
    command = [sys.executable, "-m", "engine", "serve", model, *words]
    with listen_to(command, ROOT, home) as (url, seconds), httpx.Client(base_url=url, timeout=300) as client:
        print(f"{plan}: ready after {seconds:.1f} s", flush=True)
        found = {"ready, s": seconds, **figures(client, given)}
    for shard in found["shards"]:
        print(f"  {shard}")
    if "restart" in given.tiers:
        with listen_to(command, ROOT, home) as (url, seconds), httpx.Client(base_url=url, timeout=300) as client:
            anew = {"ready again, s": seconds, **begun_anew(client, given)}
        found["said"].append(anew.pop("said"))
        found |= anew
    return found


def try_plan(plan: str, home: Path, model: str, given: argparse.Namespace) -> dict[str, Any] | None:
    """None: there is no such server here; the others are asked all the same."""
    home.mkdir()
    try:
        return measure_server(plan, model, given, home)
    except SystemExit as error:
        print(f"{plan}: {error}", flush=True)
        return None


def make_figures(found: dict[str, dict[str, Any]], subject: str) -> list[Figure]:
    """Compare each plan with the first one."""
    (first, single), *others = found.items()
    made = list[Figure]()
    for plan, one in others:
        for what, unit, name, better in (
            ("decode", "tok/s", "decode, tok/s", Goal(at_least=0.9, against=first)),
            ("decode behind all", "tok/s", "decode behind all, tok/s", Goal(at_least=0.9, against=first)),
            ("prefill", "ms", "prefill, ms", Goal(at_most=0.625, against=first)),
        ):
            goal = better if "cuda" in plan else None
            made.append(Figure("split", f"{subject}, {what}", plan, unit, one[name], {first: single[name]}, goal))
    return made


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", choices=[*SHAPES], help="random weights of it, in the place of a model")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument(
        "--folder", type=Path, help="where random weights are written, and kept, and what is kept of prompts"
    )
    parser.add_argument("--plans", nargs="+", default=["cpu:0", "cpu:0,cpu:0", "cpu:0,ipc+cpu:0"])
    parser.add_argument("--near", type=int, default=512, help="tokens of the short prompt")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--times", type=int, default=1, help="restores from host memory")
    parser.add_argument("--tiers", nargs="+", choices=("host", "disk", "restart"), default=["host", "disk"])
    parser.add_argument("--at-once", action="store_true")
    given = parser.parse_args()
    model = given.model
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        if given.shape is not None:
            model = str((given.folder or Path(scratch)) / f"random-{given.shape}-{given.layers}")
            if not Path(model).exists():
                checkpoint(Path(model), given)
        with ThreadPoolExecutor(len(given.plans) if given.at_once else 1) as pool:
            homes = [Path(scratch) / str(number) for number in range(len(given.plans))]
            asked = [pool.submit(try_plan, *each, model, given) for each in zip(given.plans, homes, strict=True)]
        done = zip(given.plans, (one.result() for one in asked), strict=True)
    found = {plan: one for plan, one in done if one is not None}
    if not found:
        return 1
    first = next(iter(found.values()))
    names = [name for name, value in first.items() if isinstance(value, float | str)]
    rows = [{"": name, **{plan: one[name] for plan, one in found.items()}} for name in names]
    print_table(f"{model}, {given.tokens} tokens", rows)
    subject = name_shape(given.shape) if given.shape else Path(given.model).name
    publish(given, f"split_serve-{slug(subject)}", {"found": found}, make_figures(found, subject))
    odd = [plan for plan, one in found.items() if one["said"] != first["said"] or not as_before(one["said"])]
    print(f"other tokens: {', '.join(odd)}" if odd else "all answer with the same tokens, cold and restored")
    return 1 if odd or len(found) < len(given.plans) else 0


if __name__ == "__main__":
    sys.exit(main())
