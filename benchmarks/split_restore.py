"""What restoring a prompt from disk takes whose layers are in several shards, beside a single device, after a restart.

`python -m benchmarks.split_restore [--model demo] [--tokens 6000] [--times 7]`; goal on two cores: at most 1.2 times
the single one's.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import anyio

from benchmarks.report import machine, median, raw, table
from effects.all import Ask, Launch
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.lookup import FindPrefix, PrefixFound
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from engine.begin import load_target
from engine.options import Options
from engine.target import Target

PLANS = ("cpu:0", "cpu:0,cpu:0", "cpu:0,ipc+cpu:0", "ipc+cpu:0,ipc+cpu:0")
SLOT = SlotId(0)


def opened(target: Target, request: RequestId, prompt: Tokens) -> None:
    effect = OpenSlot(SLOT, SLOT, 0, prompt, Sampling())
    target.executor.open(request, effect)
    assert target.transfer is not None
    target.transfer.restorer.opened(request, effect)


async def kept(target: Target, prompt: Tokens, stop: int) -> None:
    """Computed, and on its way to the disk."""
    request, chunk = RequestId(1), target.settings.chunk
    opened(target, request, prompt)
    for start in range(0, stop, chunk):
        asked = RunPrefill(SLOT, start, min(start + chunk, stop))
        (done,) = await target.executor.perform(Launch((Ask(request, asked),)))
        assert isinstance(done, PrefillAdvanced), done
    assert target.transfer is not None
    saved = await target.transfer.saver.save(request, SaveSnapshot(SLOT, prompt[:stop]))
    assert saved == SnapshotSaved(stop, stop * target.transfer.store.layout.token_bytes), saved


async def restored(target: Target, request: RequestId, prompt: Tokens, stop: int) -> float:
    """Milliseconds."""
    assert target.transfer is not None
    opened(target, request, prompt)
    found = await target.transfer.lookup.find(request, FindPrefix(prompt, 0))
    assert isinstance(found, PrefixFound), found
    done = await target.transfer.restorer.restore(request, RestoreBlocks(found.lease, SLOT, 0, stop))
    assert isinstance(done, BlocksRestored), done
    assert done.stop == stop, done
    return done.ns / 1e6


async def begun(model: str, devices: str, prompt: Tokens, folder: Path) -> tuple[Target, int]:
    """One that finds on disk what an earlier one has kept, and how many rows that is."""
    how: dict[str, Any] = {"model": model, "target_devices": devices, "draft": "none", "slots": 1}
    # Else a busy moment at the start decides how it is kept.
    how |= {"kv_cache_codec": "store", "host_cache_budget": 0}
    options = Options(**how, kv_cache_dir=folder, max_ctx=len(prompt) + 64)
    target = await load_target(options)
    stop = (len(prompt) - 1) // target.settings.block_size * target.settings.block_size
    await kept(target, prompt, stop)
    await target.close()
    return await load_target(options), stop


async def measured(model: str, prompt: Tokens, times: int) -> dict[str, list[float]]:
    """All are there at once, and restore in turns: whatever else the machine does, they share it."""
    found = {devices: list[float]() for devices in PLANS}
    with tempfile.TemporaryDirectory() as folder:
        targets = [await begun(model, devices, prompt, Path(folder) / str(at)) for at, devices in enumerate(PLANS)]
        for number in range(times + 1):
            for devices, (target, stop) in zip(PLANS, targets, strict=True):
                took = await restored(target, RequestId(2 + number), prompt, stop)
                if number:  # nobody measures the first one
                    found[devices].append(took)
        for target, _ in targets:
            await target.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--times", type=int, default=7)
    given = parser.parse_args()
    draw = random.Random(1)
    prompt = tuple(draw.randrange(5, 3000) for _ in range(given.tokens))
    found = anyio.run(measured, given.model, prompt, given.times)
    single = found[PLANS[0]]
    rows = [
        {
            "plan": name,
            "restore p50, ms": median(each),
            "least, ms": min(each),
            "times the single one's, p50": round(median(one / own for one, own in zip(each, single, strict=True)), 2),
            "least": round(min(each) / min(single), 2),
        }
        for name, each in found.items()
    ]
    table(f"{given.tokens} tokens from disk, {given.model}", rows)
    raw("split_restore", {"machine": machine(), "rows": rows, "ms": found})


if __name__ == "__main__":
    main()
