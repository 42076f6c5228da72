"""Measures how long chunks and decode steps take on this machine, unless an earlier start has measured them.

The scheduler decides by these rates until it has seen better ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from hashlib import blake2b
from itertools import chain

import torch
from attrs import evolve, frozen

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import Shard
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.interfaces.text_matching import Branch
from adapters.models.kernels.step import Segment, Step
from adapters.processors import count_processors
from effects.all import EffectRequest, Outcome
from effects.decode import MATCH_CLASSES, Decoded, RunDecode, make_copying
from effects.ids import DeviceFailed, RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.prefill import OpenSlot, RunPrefill
from engine.loading.memory.device_survey import Placement
from engine.settings.calibration_cache import CalibrationCache, are_similar
from states import step_prices
from states.copy_branches import count_branch_tokens
from states.rates import FIRST_SPAN, DecodeTimes, Rates, TimedStep

BUDGET_NS = 1_600_000_000  # for all decode steps; with a slow model each is measured once
STEADY = 8  # times still fall if one is smaller than before by more than this part of it
PASSES = 4
IN_A_ROW = 4  # steps of one width that follow each other in one launch
STRIDE = 7919  # distance between the token ids that are used
CONTEXT = 64  # rows before a measured decode step
VERSION = 6  # of the kept rates
MOST_NS = 10**11
TRIES = 2  # attempts to confirm the kept rates: something may have disturbed the first one
# Measured times may differ from kept ones by this factor. Beyond it, other programs would disturb a full measurement.
BUSY = 4
# Chunks are measured at 0 and at this position. Beyond it, time is assumed to grow as it does between the two.
FAR = {"cpu": 2048, "cuda": 16384}

# On a CPU a row takes about as long in any forward. With 64 of 256 rows, streams wait for a quarter of a chunk.
MIXED_ROWS = 64
# A decode step of a large model reads all weights. So do 512 rows of a prompt, which take 50 ms for 27B on an H200:
# decode rows in the same forward cost nearly nothing, and wait no longer than that.
MIXED_ROWS_GPU = 512


@frozen
class RateShape:
    """The sizes that rates are measured for.

    chunk: rows of a prefill chunk. context: rows that a slot may come to have. widths: numbers of a draft's proposals,
    ascending. copied: numbers of copied tokens, ascending; empty where nothing is copied. max_branch: as in `Settings`.
    """

    chunk: int
    context: int
    widths: Sequence[int]
    copied: Sequence[int] = ()
    max_branch: int = 0


class UnsearchedText:
    """Implements `TextProposer` without a text, so that steps with copies can be timed: it proposes any tokens."""

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> list[int]:
        return [self.read_match(slot, state) for slot, state in slots]

    def note_tokens(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        """Nothing is kept of a text."""

    index_texts = note_tokens

    def read_match(self, slot: int, state: SlotState) -> int:  # noqa: ARG002 - every text matches
        return MATCH_CLASSES[-1]

    def copy(self, slot: int, count: int) -> Tokens:  # noqa: ARG002 - of every text
        return (1,) * count

    def find_branch(self, slot: int, chain: int, count: int) -> Branch:  # noqa: ARG002 - of every text
        return Branch(0, (2,) * count)

    def count_on_branch(self, slot: int) -> int:  # noqa: ARG002 - nothing is learned here
        return 0


def choose_mixed_rows(devices: Set[str], shard: Pipeline) -> int:
    """Return how many prompt rows a forward may have together with decode steps. 0: none.

    devices: the kinds of device that have layers. With a GPU both can run at once (`choose_concurrent_rows`), or they
    take turns. The exception is a model with recurrent layers, if its kernels take both in one step.
    """
    if devices == {"cuda"} and shard.states.specs and shard.states.commits_per_segment:
        return MIXED_ROWS_GPU
    return MIXED_ROWS if devices == {"cpu"} else 0


def choose_concurrent_rows(plan: Sequence[Placement], shard: Shard, buckets: Sequence[int], *, drafted: bool) -> int:
    """Return the number of rows above which a prefill runs at the same time as decode steps. 0: no prefill does.

    That needs one GPU of this process that has the whole model, without a draft and without recurrent state. buckets:
    those that were proven. Without the bucket of that many rows, narrower forwards would run with the buffers of wider
    ones; without a wider bucket no prefill is that wide.
    """
    here = len(plan) == 1 and plan[0].is_local and plan[0].device.type == "cuda" and NARROW in buckets[:-1]
    return NARROW if here and shard.spec.runs_ahead and not drafted and not shard.states.specs else 0


def choose_prefill_span(shard: Pipeline, *, concurrent: bool) -> int:
    """Return the number of chunks that one prefill effect may span.

    Devices that are only launched ahead have more than one if other work can end a launch between two of them.
    """
    return shard.span if concurrent or not shard.launches_ahead else 1


def load_or_measure_rates(
    kept: CalibrationCache,
    key: str,
    executor: DeviceExecutor,
    shard: Shard,
    shape: RateShape,
) -> Rates:
    """Return the rates that an earlier start kept, if they still hold, or measure them.

    They hold if a chunk and the two plainest decode steps still take about as long. If those are quicker now, something
    disturbed the earlier start, and the quicker times replace the earlier ones.
    """
    before = kept.recall(key, from_json)
    chunk = shape.chunk
    rows = min(chunk, shape.context)
    for _ in range(TRIES):
        if before is None:
            break
        near = time_call(lambda: run_chunk(shard, 0, rows, chunk)) // rows
        now = Rates((near,), decode=measure_decode(executor, shard, shape.context, shape.widths[:2], passes=2))
        if do_rates_agree(before, now):
            if (better := take_quicker_steps(before, now)) != before:
                kept.remember(key, to_json(better))
            return better
    found = measure_rates(executor, shard, shape)
    kept.remember(key, to_json(found))
    return found


def build_rates_key(*facts: object) -> str:
    """Return the key under which rates are kept: 32 hex digits over the facts that they depend on, as the identity."""
    parts = (VERSION, torch.get_num_threads(), count_processors(), *facts)
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def do_rates_agree(before: Rates, now: Rates) -> bool:
    """Return whether a few rates, measured again, are about as they were before."""
    steps = {step_time[:3]: step_time.ns for step_time in before.decode}
    near = are_similar(now.prefill[0], before.prefill[0], BUSY) if before.prefill else False
    return near and all(are_similar(step_time.ns, steps.get(step_time[:3], 0), BUSY) for step_time in now.decode)


def take_quicker_steps(before: Rates, now: Rates) -> Rates:
    """Return the earlier rates with the decode steps of `now` that took less. The times of mixed steps are kept."""
    found = {(span, members, rows): (ns, plain_ns) for span, members, rows, ns, plain_ns in before.decode}
    plain = 0
    # The plain step comes first.
    for span, members, rows, ns, plain_ns in now.decode:
        if ns < found[span, members, rows][0]:
            found[span, members, rows] = ns, plain_ns and plain
        plain = plain or found[span, members, rows][0]
    return evolve(before, decode=tuple(TimedStep(*key, ns, plain_ns) for key, (ns, plain_ns) in found.items()))


def to_json(rates: Rates) -> str:
    """Return rates as JSON for the calibration cache."""
    steps = {"decode": rates.decode, "copy_times": rates.copy_times, "branch_times": rates.branch_times}
    return json.dumps({"version": VERSION, "prefill": rates.prefill, **steps})


def from_json(text: str) -> Rates:
    """Read what `to_json` wrote. Raises ValueError for anything else."""
    value = json.loads(text)
    match value:
        case {
            "version": number,
            "prefill": [*prefill],
            "decode": [*decode],
            "copy_times": [*copied],
            "branch_times": [*branched],
            **more,
        } if number == VERSION and not more:
            lists = [prefill, *decode, *copied, *branched]
        case _:
            raise ValueError("not what this version keeps of times")
    if not all(isinstance(row, list) and all(type(ns) is int and 0 <= ns <= MOST_NS for ns in row) for row in lists):
        raise ValueError("a time that cannot be")
    steps, copies, branches = map(read_times, (decode, copied, branched))
    return Rates(prefill=tuple(prefill), decode=steps, copy_times=copies, branch_times=branches)


def read_times(found: Sequence[Sequence[int]]) -> DecodeTimes:
    """Return the times of steps that were read. Raises ValueError where one does not have five numbers."""
    return tuple(TimedStep(span, members, rows, ns, plain) for span, members, rows, ns, plain in found)


def measure_rates(executor: DeviceExecutor, shard: Shard, shape: RateShape) -> Rates:
    """Measure chunks and decode steps, on the lane, before any request is served."""
    return Rates(
        prefill=measure_prefill(shard, shape.chunk, shape.context),
        decode=measure_decode(executor, shard, shape.context, shape.widths),
        copy_times=measure_copies(executor, shard, shape, 0) if shape.copied else (),
        branch_times=measure_copies(executor, shard, shape, shape.max_branch) if shape.copied else (),
    )


def measure_copies(executor: DeviceExecutor, shard: Shard, shape: RateShape, branch: int) -> DecodeTimes:
    """Measure the decode steps of one request that copies, in the format of `Rates.copy_times`.

    branch: 0, or the most tokens of a branch. Then steps whose copies would be a chain are left out.
    """
    copying = DeviceExecutor(evolve(executor.parts, text_proposer=UnsearchedText()))
    branches = {width: count_branch_tokens(width, branch) for width in shape.copied}
    widths = {0: 0} | {width: count for width, count in branches.items() if count or not branch}
    times = measure_decode(copying, shard, shape.context, list(widths), branches=widths) if len(widths) > 1 else ()
    return tuple(step_time for step_time in times if step_time.rows)


def measure_prefill(shard: Shard, chunk: int, context: int) -> tuple[int, ...]:
    """Return nanoseconds per token by position, as in `Rates.prefill`.

    Two chunks are measured, and times between them are interpolated.
    """
    rows = min(chunk, context)
    far = (min(context, FAR[shard.spec.device.type]) - rows) // shard.states.block * shard.states.block
    near_ns = time_quickest(lambda: run_chunk(shard, 0, rows, chunk))
    slope = max(0.0, time_quickest(lambda: run_chunk(shard, far, rows, chunk)) - near_ns) / far if far else 0.0
    found = list[int]()
    start = 0
    stop = FIRST_SPAN
    while start < context:
        middle = (start + min(stop, context)) / 2
        found.append(max(1, round((near_ns + slope * max(0.0, middle - rows / 2)) / rows)))
        start = stop
        stop = stop * 2
    return tuple(found)


def run_chunk(shard: Shard, start: int, rows: int, chunk: int) -> None:
    """Compute one chunk of this many rows at `start` and wait for it."""
    step = Step((Segment(0, start, rows),), chunk, rows_only=True)
    if start and shard.states.specs:
        shard.states.import_(0, shard.states.export(0), start)  # any will do
    shard.forward(step, torch.tensor(make_tokens(shard, rows)))
    shard.synchronize()


def make_tokens(shard: Shard, count: int) -> list[int]:
    """Return tokens that differ from each other: rows of one repeated token would be unlike any that are kept."""
    return [number * STRIDE % shard.spec.vocab_size for number in range(count)]


def time_quickest(work: Callable[[], None]) -> int:
    """Return the nanoseconds of the quicker one of two calls."""
    return min(time_call(work) for _ in range(2))


def time_call(work: Callable[[], None]) -> int:
    """Return the nanoseconds of a call."""
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def measure_decode(
    executor: DeviceExecutor,
    shard: Shard,
    context: int,
    widths: Sequence[int],
    *,
    passes: int = PASSES,
    branches: Mapping[int, int] | None = None,
) -> DecodeTimes:
    """Measure the decode steps of one request, its draft included, in the format of `Rates.decode`.

    branches: the proposals are copied, and no draft is asked; of each width, so many of them are a branch.

    Widths take turns, so that a disturbance costs one time of each width and not all times of one. The quickest time
    counts. Some steps of a width follow each other in one launch as in serving: the device continues alone, and each
    takes less time. The first step may warm up, and lets the draft catch up.
    """
    slot = SlotId(0)
    known = min(CONTEXT, context // 2)
    started = time.perf_counter_ns()
    tokens = make_tokens(shard, known)
    # for each launch, the number of outcomes before it
    rounds = list[dict[int, int]]()
    begun = list[int]()

    def choose_next_launch(outcomes: Sequence[Outcome]) -> EffectRequest | None:
        if not outcomes:
            return EffectRequest(RequestId(0), RunPrefill(slot, 0, known - 1))
        if isinstance(outcomes[-1], DeviceFailed):
            return None
        new = outcomes[begun[-1] :] if begun else ()
        tokens.extend(chain.from_iterable(done.tokens for done in new if isinstance(done, Decoded)))
        if begun and len(begun) % len(widths) == 0:
            rounds.append(find_quickest_steps(outcomes[begun[-len(widths)] :]))
            if has_enough_rounds(rounds, time.perf_counter_ns() - started, passes // 2):
                return None
        width = widths[len(begun) % len(widths)]
        begun.append(len(outcomes))
        step = RunDecode(slot, len(tokens) - 1, tokens[-1], width if branches is None else 0, steps=IN_A_ROW)
        if branches and width:
            rule = make_copying(width, branches[width], IN_A_ROW)
            step = evolve(step, steps=IN_A_ROW * (1 + width), copying=rule)
        return EffectRequest(RequestId(0), step)

    if known < 2:
        return ()
    outcomes = executor.rehearse(OpenSlot(slot, slot, 0, tuple(tokens), Sampling()), choose_next_launch)
    found = find_quickest_steps(outcomes)
    shapes = {step_prices.Shape(0, 1, 1 + width if width else 0).key: ns for width, ns in found.items()}
    return tuple(TimedStep(*key, ns, found.get(0, 0) if key[2] else 0) for key, ns in sorted(shapes.items()))


def find_quickest_steps(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """Return the nanoseconds of the quickest step that has a time, for each number of proposals."""
    times: dict[int, int] = {}
    for done in outcomes:
        if isinstance(done, Decoded) and done.ns:
            times[done.proposed] = min(done.ns, times.get(done.proposed, done.ns))
    return dict(sorted(times.items()))


def has_enough_rounds(rounds: Sequence[dict[int, int]], spent_ns: int, wanted: int) -> bool:
    """Return True if measuring may stop.

    That is when `wanted` rounds have times and the last one found no clearly quicker time, or when the budget of time
    is spent. A prompt's first step may have no time (`last_row.has_own_time`).
    """
    *before, last = rounds
    known = {width: min(times.get(width, ns) for times in before) for width, ns in last.items()} if before else last
    falls = any(ns + ns // STEADY < known[width] for width, ns in last.items())
    return spent_ns > BUDGET_NS or (sum(map(bool, rounds)) >= wanted and not falls)
