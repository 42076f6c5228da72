"""How long things take here, measured at start or kept from an earlier one: what policies decide by until they have
seen better."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence, Set
from hashlib import blake2b
from itertools import chain

import torch
from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.shard import Shard
from adapters.models.kernels.interface import NARROW
from adapters.models.kernels.step import Segment, Step
from effects.all import EffectRequest, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed, RequestId, SlotId
from effects.job import Sampling
from effects.prefill import OpenSlot, RunPrefill
from engine.loading.device_survey import Placement
from engine.settings.calibration_cache import Kept, alike
from states import launch_prices
from states.rates import FIRST_SPAN, Rates

BUDGET_NS = 1_600_000_000  # for all decode steps: a slow model is measured once
STEADY = 8  # they fall, if one is less by more than that part
PASSES = 4
IN_A_ROW = 4  # steps
STRIDE = 7919  # between the tokens that are tried
CONTEXT = 64  # rows before a measured decode step
VERSION = 4  # of what is kept
MOST_NS = 10**11
TRIES = 2  # to find that what was kept still holds: something may have been in the way of the first
BUSY = 4  # times as long, and others use the machine: they would be in the way of measuring all of it again, too
FAR = {"cpu": 2048, "cuda": 16384}  # chunks are measured at 0 and up to here; beyond, time grows as it does between

MIXED_ROWS = 64  # on a CPU, where a row takes about as long in any forward: streams wait for a quarter of a chunk


def mixed_rows(devices: Set[str]) -> int:
    """Of a forward that has decode steps and the next rows of a prompt. devices: kinds of those that have layers. 0 on
    a GPU: both can be at work there at once (`beside_rows`), or else they take turns.
    """
    return MIXED_ROWS if devices == {"cpu"} else 0


def beside_rows(plan: Sequence[Placement], shard: Shard, buckets: Sequence[int], *, drafted: bool) -> int:
    """Prefills of more rows than that go beside decode steps: where one GPU of this process has the whole model, and
    nothing of a prompt but its rows has to be kept in step with who decodes. 0: none do. buckets: those proven; without
    the one of that many rows, narrower forwards would run with wider ones' buffers, and without wider ones none do.
    """
    here = len(plan) == 1 and plan[0].local and plan[0].device.type == "cuda" and NARROW in buckets[:-1]
    return NARROW if here and shard.runs_ahead and not drafted and not shard.state_specs else 0


def span(shard: Pipeline, *, beside: bool) -> int:
    """Chunks that one prefill may be of. Those that are only launched ahead go beside decode steps or not at all: on
    their lane nobody would have the launch give way.
    """
    return shard.span if beside or not shard.ahead else 1


def kept_or_measured(
    kept: Kept, key: str, executor: DeviceExecutor, shard: Shard, *, chunk: int, context: int, widths: Sequence[int]
) -> Rates:
    """As `measured`; what an earlier start left is believed where a chunk and the two plainest decode steps still take
    about as long. Where those are quicker now, something was in the way then.
    """
    before, rows = kept.recalled(key, from_json), min(chunk, context)
    for _ in range(TRIES):
        if before is None:
            break
        near = timed(lambda: run_chunk(shard, 0, rows, chunk)) // rows
        now = Rates((near,), decode=decode(executor, shard, context, widths[:2], passes=2))
        if agree(before, now):
            if (better := quicker(before, now)) != before:
                kept.remember(key, to_json(better))
            return better
    found = measured(executor, shard, chunk=chunk, context=context, widths=widths)
    kept.remember(key, to_json(found))
    return found


def key(*facts: object) -> str:
    """Under which times may be kept: 32 hex digits over what they depend on. facts: the identity among them."""
    parts = (VERSION, torch.get_num_threads(), os.cpu_count(), *facts)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def agree(before: Rates, now: Rates) -> bool:
    """now: a few of the times, measured again."""
    steps = {tuple(key): ns for *key, ns, _ in before.decode}
    near = alike(now.prefill[0], before.prefill[0], BUSY) if before.prefill else False
    return near and all(alike(ns, steps.get(tuple(key), 0), BUSY) for *key, ns, _ in now.decode)


def quicker(before: Rates, now: Rates) -> Rates:
    """With those decode steps of `now` that took less. What others took stays beside the plain ones of then."""
    found = {(span, members, rows): (ns, beside) for span, members, rows, ns, beside in before.decode}
    plain = 0
    for span, members, rows, ns, beside in now.decode:  # the plain one comes first
        if ns < found[span, members, rows][0]:
            found[span, members, rows] = ns, beside and plain
        plain = plain or found[span, members, rows][0]
    return evolve(before, decode=tuple((*key, ns, beside) for key, (ns, beside) in found.items()))


def to_json(rates: Rates) -> str:
    return json.dumps({"version": VERSION, "prefill": rates.prefill, "decode": rates.decode})


def from_json(text: str) -> Rates:
    """What `to_json` wrote; ValueError for anything else."""
    value = json.loads(text)
    match value:
        case {"version": number, "prefill": [*prefill], "decode": [*decode], **more} if number == VERSION and not more:
            lists = [prefill, *decode]
        case _:
            raise ValueError("not what this version keeps of times")
    if not all(isinstance(each, list) and all(type(ns) is int and 0 <= ns <= MOST_NS for ns in each) for each in lists):
        raise ValueError("a time that cannot be")
    return Rates(
        prefill=tuple(prefill),
        decode=tuple((span, members, rows, ns, plain) for span, members, rows, ns, plain in decode),
    )


def measured(executor: DeviceExecutor, shard: Shard, *, chunk: int, context: int, widths: Sequence[int]) -> Rates:
    """On the lane, before anybody is served. context: rows that a slot may come to. widths: proposals, ascending."""
    return Rates(prefill=prefill(shard, chunk, context), decode=decode(executor, shard, context, widths))


def prefill(shard: Shard, chunk: int, context: int) -> tuple[int, ...]:
    """Per token, by where it stands, as `Rates.prefill` wants it; from two chunks and a straight line."""
    rows = min(chunk, context)
    far = (min(context, FAR[shard.device.type]) - rows) // shard.state_block * shard.state_block
    near_ns = quickest(lambda: run_chunk(shard, 0, rows, chunk))
    slope = max(0.0, quickest(lambda: run_chunk(shard, far, rows, chunk)) - near_ns) / far if far else 0.0
    found, start, stop = list[int](), 0, FIRST_SPAN
    while start < context:
        middle = (start + min(stop, context)) / 2
        found.append(max(1, round((near_ns + slope * max(0.0, middle - rows / 2)) / rows)))
        start, stop = stop, stop * 2
    return tuple(found)


def run_chunk(shard: Shard, start: int, rows: int, chunk: int) -> None:
    step = Step((Segment(0, start, rows),), chunk, rows_only=True)
    if start and shard.state_specs:
        shard.import_state(0, shard.export_state(0))  # any will do, and goes on from wherever a chunk starts
    shard.forward(step, torch.tensor(some_tokens(shard, rows)))
    shard.synchronize()


def some_tokens(shard: Shard, count: int) -> list[int]:
    """All kinds of them: rows of one and the same token are like no rows that are ever kept."""
    return [number * STRIDE % shard.vocab_size for number in range(count)]


def quickest(work: Callable[[], None]) -> int:
    """Nanoseconds, of two."""
    return min(timed(work) for _ in range(2))


def timed(work: Callable[[], None]) -> int:
    """Nanoseconds."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def decode(
    executor: DeviceExecutor, shard: Shard, context: int, widths: Sequence[int], passes: int = PASSES
) -> launch_prices.DecodeTimes:
    """As `Rates.decode` wants it: of one request's launches, its draft included.

    Widths take turns, so that what holds the machine up for a while holds up one time of each and not all of one; the
    quickest counts. Some of each follow each other, as they do when somebody is served: the device goes on alone, and
    takes less time for each. The first may warm up, and lets the draft catch up.
    """
    slot, known, started = SlotId(0), min(CONTEXT, context // 2), time.perf_counter_ns()
    tokens = some_tokens(shard, known)
    rounds, begun = list[dict[int, int]](), list[int]()  # of each launch the outcomes before it

    def following(outcomes: Sequence[Outcome]) -> EffectRequest | None:
        if not outcomes:
            return EffectRequest(RequestId(0), RunPrefill(slot, 0, known - 1))
        if isinstance(outcomes[-1], DeviceFailed):
            return None
        new = outcomes[begun[-1] :] if begun else ()
        tokens.extend(chain.from_iterable(done.tokens for done in new if isinstance(done, Decoded)))
        if begun and len(begun) % len(widths) == 0:
            rounds.append(least(outcomes[begun[-len(widths)] :]))
            if enough(rounds, time.perf_counter_ns() - started, passes // 2):
                return None
        width = widths[len(begun) % len(widths)]
        begun.append(len(outcomes))
        return EffectRequest(RequestId(0), RunDecode(slot, len(tokens) - 1, tokens[-1], width, steps=IN_A_ROW))

    if known < 2:
        return ()
    outcomes = executor.rehearse(OpenSlot(slot, slot, 0, tuple(tokens), Sampling()), following)
    found = least(outcomes)
    shapes = {launch_prices.Shape(0, 1, 1 + width if width else 0).key: ns for width, ns in found.items()}
    return tuple((*key, ns, found.get(0, 0) if key[2] else 0) for key, ns in sorted(shapes.items()))


def least(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """The quickest launch with so many proposals."""
    times: dict[int, int] = {}
    for done in outcomes:
        if isinstance(done, Decoded):
            times[done.proposed] = min(done.ns, times.get(done.proposed, done.ns))
    return dict(sorted(times.items()))


def enough(rounds: Sequence[dict[int, int]], spent_ns: int, wanted: int) -> bool:
    """Of `wanted` rounds at least, the last one brought nothing that is clearly quicker; or they take too long."""
    *before, last = rounds
    known = {width: min(one.get(width, ns) for one in before) for width, ns in last.items()} if before else last
    falls = any(ns + ns // STEADY < known[width] for width, ns in last.items())
    return spent_ns > BUDGET_NS or (len(rounds) >= wanted and not falls)
