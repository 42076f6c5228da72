"""Measures how long the restore of a prompt takes if its layers are in several shards, compared with a single device:
from disk after a restart, or from host memory.

`python -m benchmarks.split_restore [--model demo] [--tier disk] [--tokens 6000] [--times 7] [--http]`. The goal on two
cores is at most 1.2 times the single device's time. A restore may report its end before all of its rows are where they
go. So two more times are measured: until every shard has said that its rows are there, and until the first decode step
behind the restore is done, which needs them. Later steps show what such a step takes by itself. `--http` measures until
a client has the first token of the prompt, with another prompt in between.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from inspect import isawaitable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
from attrs import frozen

from adapters.remote.client.remote_shard import RemoteShard
from adapters.transfer.saver import UNPACED
from benchmarks.arguments import benchmark_parser
from benchmarks.peer_servers import ROOT, listen_to
from benchmarks.results import Figure, Goal, publish
from benchmarks.split_serve import wait_for_writes
from benchmarks.tables import median, print_table
from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.lookup import FindPrefix, PrefixFound
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options

PLANS = ("cpu:0", "cpu:0,cpu:0", "cpu:0,ipc+cpu:0", "ipc+cpu:0,ipc+cpu:0")
FIGURES = {
    "reported_ms": "a restore, as it says itself",
    "there_ms": "until every shard elsewhere has said that it has the rows",
    "used_ms": "a restore and the first decode step behind it",
    "step_ms": "a decode step",
    "usable_ms": "both, less such a step",
    "processor_ms": "processor time of a restore and all steps",
}
STEPS = 4  # behind a restore: the first one needs its rows, the others say what one takes
SLOT = SlotId(0)
HOST_MIB = 256


@frozen
class RestoreTook:
    """The times of a restore, in milliseconds.

    reported_ms: as the restore itself reports. there_ms: of another restore, until every shard with a part of it has
    reported. used_ms: until the first decode step behind it is done. step_ms: of the steps after it, at the median.
    processor_ms: of all processes that take part.
    """

    reported_ms: float
    there_ms: float
    used_ms: float
    step_ms: float
    processor_ms: float

    @property
    def usable_ms(self) -> float:
        """Return the milliseconds until rows can be used wherever they are needed."""
        return self.used_ms - self.step_ms


def open_slot(target: LoadedModel, request: RequestId, prompt: Tokens) -> None:
    effect = OpenSlot(SLOT, SLOT, 0, prompt, Sampling())
    target.executor.open(request, effect)
    assert target.transfer is not None
    target.transfer.restorer.place_fence(request, effect)


async def keep_prompt(target: LoadedModel, prompt: Tokens, stop: int) -> None:
    """Computed, and on its way to the disk."""
    request, chunk = RequestId(1), target.settings.chunk
    open_slot(target, request, prompt)
    for start in range(0, stop, chunk):
        asked = RunPrefill(SLOT, start, min(start + chunk, stop))
        (done,) = await target.executor.perform(Launch((EffectRequest(request, asked),)))
        assert isinstance(done, PrefillAdvanced), done
    assert target.transfer is not None
    saving = target.transfer.saver.save(request, SaveSnapshot(SLOT, prompt[:stop]))
    target.transfer.saver.pace_snapshot(request, UNPACED)
    saved = await saving
    assert saved == SnapshotSaved(stop, stop * target.transfer.store.layout.token_bytes), saved


def measure_processor_time(target: LoadedModel) -> float:
    """Seconds of processor time that this process has had, and those in which the target has layers."""
    peers = [part.peer for part in target.shard.parts if isinstance(part, RemoteShard)]
    clocks = [~peer.facts.pid << 3 | 2 for peer in peers if peer.facts is not None]  # as clock_getcpuclockid has it
    return time.process_time() + sum(map(time.clock_gettime, clocks))


async def restore_prompt(target: LoadedModel, request: RequestId, prompt: Tokens, stop: int, tier: str) -> RestoreTook:
    assert target.transfer is not None
    prompt, processor = prompt[: stop + 1], measure_processor_time(target)
    _, began = await restore_rows(target, request, prompt, stop, tier)
    await target.transfer.restorer.lane.run(partial(wait_for_shards, target))
    there = 1e3 * (time.perf_counter() - began)
    reported, began = await restore_rows(target, request, prompt, stop, tier)
    token, clock = prompt[-1], list[float]()
    for position in range(stop, stop + STEPS):
        token = await decode_step(target, request, position, token)
        clock.append(1e3 * (time.perf_counter() - began))
    step = median(after - before for before, after in pairwise(clock))
    return RestoreTook(reported, there, clock[0], step, 1e3 * (measure_processor_time(target) - processor))


async def restore_rows(
    target: LoadedModel, request: RequestId, prompt: Tokens, stop: int, tier: str
) -> tuple[float, float]:
    """Milliseconds that it took as it says itself, and when it began."""
    assert target.transfer is not None
    open_slot(target, request, prompt)
    found = target.transfer.lookup.find_prefix(request, FindPrefix(prompt, 0))
    if isawaitable(found):  # a tier had to be asked
        found = await found
    assert isinstance(found, PrefixFound), found
    assert found.tier == tier, found
    began = time.perf_counter()
    done = await target.transfer.restorer.restore(request, RestoreBlocks(found.lease, SLOT, 0, stop))
    assert isinstance(done, BlocksRestored), done
    assert done.stop == stop, done
    return done.ns / 1e6, began


def wait_for_shards(target: LoadedModel) -> None:
    """Wait on the lane until the other shards have acknowledged all rows that were sent to them."""
    for part in target.shard.parts:
        if isinstance(part, RemoteShard):
            part.peer.read_posted_answers()


async def decode_step(target: LoadedModel, request: RequestId, position: int, token: int) -> int:
    (done,) = await target.executor.perform(Launch((EffectRequest(request, RunDecode(SLOT, position, token)),)))
    assert isinstance(done, Decoded), done
    return done.tokens[-1]


async def load_with_rows(model: str, devices: str, prompt: Tokens, folder: Path, tier: str) -> tuple[LoadedModel, int]:
    """One that finds on disk what an earlier one has kept, or in host memory what it has, and how many rows that is."""
    how: dict[str, Any] = {"model": model, "target_devices": devices, "draft": "none", "slots": 1}
    # Else a busy moment at the start decides how it is kept.
    how |= {"kv_cache_codec": "store", "host_cache_budget": 0 if tier == "disk" else HOST_MIB}
    options = build_options(**how, kv_cache_dir=folder, max_ctx=len(prompt) + 64)
    target = await load_target(options)
    stop = (len(prompt) - 1) // target.settings.block_size * target.settings.block_size
    await keep_prompt(target, prompt, stop)
    if tier == "host":
        return target, stop
    await target.close()
    return await load_target(options), stop


async def measure_restores(model: str, prompt: Tokens, times: int, tier: str) -> dict[str, list[RestoreTook]]:
    """All are there at once, and restore in turns: whatever else the machine does, they share it."""
    found = {devices: list[RestoreTook]() for devices in PLANS}
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(at) for at in range(len(PLANS))]
        targets = [
            await load_with_rows(model, *each, tier) for each in zip(PLANS, [prompt] * len(PLANS), folders, strict=True)
        ]
        for number in range(times + 1):
            for devices, (target, stop) in zip(PLANS, targets, strict=True):
                took = await restore_prompt(target, RequestId(2 + number), prompt, stop, tier)
                if number:  # the first one is not measured
                    found[devices].append(took)
        for target, _ in targets:
            await target.close()
    return found


def first_tokens(model: str, prompt: Tokens, times: int, tier: str) -> dict[str, list[float]]:
    """Milliseconds until a client has them, of servers that are all there at once and asked in turns."""
    found = {devices: list[float]() for devices in PLANS}
    words = ("--draft", "none", "--slots", "1", "--max-ctx", str(len(prompt) + 64), "--kv-cache-codec", "store")
    words += ("--kv-cache-min-tokens", "64", "--host-cache-budget", str(0 if tier == "disk" else HOST_MIB))

    def asked(client: httpx.Client, tokens: Tokens) -> tuple[float, str]:
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        said = client.post("/v1/completions", json=body).raise_for_status().json()
        return 1e3 * (time.perf_counter() - began), said["rekindle"]["tier"]

    with ExitStack() as stack:
        clients = list[httpx.Client]()
        for devices in PLANS:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            command = [sys.executable, "-m", "engine", "serve", model, "--target-devices", devices, *words]
            url, _ = stack.enter_context(listen_to([*command, "--kv-cache-dir", str(home)], ROOT, home))
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=300)))
            asked(clients[-1], prompt)
            wait_for_writes(clients[-1])
        for number in range(times + 1):
            for devices, client in zip(PLANS, clients, strict=True):
                asked(client, prompt[: -100 - number : -1])  # the slot has this one then
                took, where = asked(client, prompt)
                assert where == tier, where
                if number:  # the first one is not measured
                    found[devices].append(took)
    return found


def compare_with_single(plan: str, what: str, each: list[float], single: list[float]) -> dict[str, Any]:
    """Compare the milliseconds of a plan with those of the single device."""
    return {
        "plan": plan,
        f"{what} p50, ms": median(each),
        "least, ms": round(min(each), 2),
        "times the single one's, p50": times(each, single),
        "more, ms": round(median(one - own for one, own in zip(each, single, strict=True)), 2),
        "least": round(min(each) / min(single), 2),
    }


def make_figures(rows: list[dict[str, Any]], how: str, given: argparse.Namespace) -> list[Figure]:
    """Compare each plan with the single device."""
    subject, goal = f"restore {how} from {given.tier}, {given.tokens} tokens, over one device", Goal(at_most=1.2)
    return [
        Figure("split", subject, row["plan"], "x", row["times the single one's, p50"], goal=goal) for row in rows[1:]
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tier", choices=("disk", "host"), default="disk")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--http", action="store_true")
    given = parser.parse_args()
    draw = random.Random(1)
    prompt = tuple(draw.randrange(5, 3000) for _ in range(given.tokens))
    if given.http:
        heard = first_tokens(given.model, prompt, given.times, given.tier)
        reported = [compare_with_single(name, "first token", each, heard[PLANS[0]]) for name, each in heard.items()]
        print_table(f"{given.tokens} tokens from {given.tier} over HTTP, {given.model}", reported)
        figures = make_figures(reported, "over HTTP", given)
        publish(
            given, f"split_restore-http-{given.tier}-{given.tokens}", {"rows": reported, "ms": heard}, figures, "cpu"
        )
        return
    found = anyio.run(measure_restores, given.model, prompt, given.times, given.tier)
    ms = {of: {name: [getattr(one, of) for one in each] for name, each in found.items()} for of in FIGURES}
    rows = {
        of: [compare_with_single(name, "its", each, own[PLANS[0]]) for name, each in own.items()]
        for of, own in ms.items()
    }
    for of, title in FIGURES.items():
        print_table(f"{given.tokens} tokens from {given.tier}, {given.model}: {title}", rows[of])
    figures = make_figures(rows["reported_ms"], "alone", given)
    publish(given, f"split_restore-{given.tier}-{given.tokens}", {"rows": rows, "ms": ms}, figures, "cpu")


def times(these: list[float], single: list[float]) -> float:
    """Return how many times as long as the single device's time of the same turn each one is, at the median."""
    return round(median(one / own for one, own in zip(these, single, strict=True)), 2)


if __name__ == "__main__":
    main()
