"""What serving would make on its first use is made before anybody waits for it: kernels, graphs, buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from itertools import product
from typing import Any

import torch

from adapters.device.sampling.sampler import Draw, Picking, Sampler, start_picking
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.pipelined_chunks import current
from adapters.models.decoder.shard import BUCKETS, Shard
from adapters.models.drafts.cached_draft import CachedDraft, first_tokens
from adapters.models.kernels.collector_pause import pause_collector
from adapters.models.kernels.factory import build_compiler, build_step_pacer
from adapters.models.kernels.interface import ALONE
from adapters.models.kernels.layer_kinds import run_one_of_each
from adapters.models.kernels.sampling_interface import PENDING
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import PROBED_SLOTS, buckets_of, probe_key
from adapters.models.numerics.synthetic import RandomWeights, packed_in
from adapters.models.open_checkpoint import Checkpoint
from effects.ids import PAGE
from effects.job import Sampling
from engine.loading.device_survey import Placement, build_kernels, keep_compiled, nothing_compiled, probing
from engine.loading.load_draft import Room
from engine.loading.memory_fit import Fit
from engine.settings import start_progress
from engine.settings.calibration_cache import Kept

log = logging.getLogger("rekindle")

PICKED = (
    Sampling(logprobs=1),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01),
    Sampling(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, logit_bias=((0, 1.0),)),
)
READING_S = 0.2  # a step's kernels, at most: what takes longer is compiled
PASSES = {"cpu": 1, "cuda": 2}  # once for kernels and buffers; a graph is recorded, and replayed, the second time


def compile_kernels(
    checkpoint: Checkpoint,
    plan: Sequence[Placement],
    dtype: torch.dtype,
    *,
    rows: torch.dtype,
    fit: Fit,
    chunk: int,
    kept: Kept,
    step: start_progress.StepHeard,
) -> None:
    """On a GPU, what steps of each bucket launch is compiled, or read as an earlier start has compiled it, side by
    side: whoever comes later in this process would do that one kernel after the other. The steps are of one layer of
    each kind of the model, with weights of no meaning; where nothing was proven yet they are taken twice, the first
    time with nothing launched (`compile_first`). What fails here fails again where it matters.

    kept: where outcomes of the probe are, which launches kernels that nobody else does.
    """
    device = gpu_of(plan)
    if device is None:
        return
    compiler = build_compiler()
    major, minor = torch.cuda.get_device_capability(device)
    answers = (compiler.start_key(), compiler.start_tool_versions(10 * major + minor))
    buckets = buckets_of(BUCKETS, chunk)
    asked = probing(checkpoint, device, (dtype, rows), chunk, fit.context)
    probed = kept.proven(probe_key(checkpoint.family, checkpoint.config, build_kernels(device, dtype), **asked))
    paged = [{"slots": fit.slots, "pages": -(-fit.context // PAGE)}] if fit.pages else []
    kinds = paged if paged and probed else [{"slots": PROBED_SLOTS, "pages": 0}, *paged]
    shape: dict[str, Any] = {"device": device, "dtype": dtype, "rows": rows, "buckets": buckets}
    with torch.inference_mode(), current(device):
        for small, layers, own in packed_in(checkpoint.config.probed(), checkpoint.layouts):
            weights, shards = RandomWeights(small, 1, device, dtype, layouts=own), list[Shard]()
            try:
                for kind in kinds:
                    kernels = build_kernels(device, dtype)
                    kernels.graphs.enabled = False  # type: ignore[attr-defined] # these are Triton's
                    how = {**shape, **kind, "layers": layers, "capacity": fit.context}
                    shards.append(checkpoint.family.build(small, weights, kernels, **how))
            except torch.OutOfMemoryError as error:
                log.debug("kernels are compiled later: %s", error)
            for thread in answers:
                thread.join()
            step(start_progress.COMPILE)
            steps = [partial(compile_step, *one) for one in product(shards, range(len(buckets)))]
            if not probed:
                compile_first(steps)
            run_side_by_side(steps)
            for shard in shards:
                shard.synchronize()
                shard.close()


def compiled_beside(checkpoint: Checkpoint, plan: Sequence[Placement], dtype: torch.dtype, **how: Any) -> str:
    """The digest of the weights, which is taken while kernels are compiled where it was not begun before. how: as
    `compile_kernels` has it.
    """
    with ThreadPoolExecutor(1, "digest") as beside:
        digest = beside.submit(checkpoint.digest)
        compile_kernels(checkpoint, plan, dtype, **how)
    return digest.result()


def compile_first(steps: Sequence[Callable[[], object]]) -> None:
    """What they launch is compiled by processes of its own, and nothing is launched: where nothing was compiled
    before, as far as anybody knows. What goes wrong is compiled later.
    """
    with ThreadPoolExecutor(1, "compile-first") as thread:
        tell_later([thread.submit(copy_context().run, compile_asked, steps)])


def compile_asked(steps: Sequence[Callable[[], object]]) -> None:
    with build_compiler().collect_requests() as requests, ThreadPoolExecutor(1, "asking") as thread:
        begun = [thread.submit(copy_context().run, step) for step in steps]
    tell_later(begun)
    requests.compile_in_processes()


def tell_later(steps: Iterable[Future[Any]]) -> None:
    for error in filter(None, (one.exception() for one in steps)):
        log.debug("some kernels are compiled later: %s", error)


def run_side_by_side(steps: Sequence[Callable[[], None]]) -> None:
    """Each on a thread of its own, which begins when the one before it has ended, until one takes so long that it must
    be compiling; a kernel that several of them need is compiled once. Reading what an earlier start compiled takes an
    interpreter, for 0.15 s in all: threads that do so side by side keep it from each other for three times as long.
    """
    with build_compiler().compile_in_threads(), ThreadPoolExecutor(len(steps) or 1, "first-steps") as threads:
        begun, only_read = list[Future[None]](), True
        for step in steps:
            begun.append(threads.submit(copy_context().run, step))
            only_read = only_read and bool(wait(begun[-1:], READING_S).done)
    tell_later(begun)


def compile_step(shard: Shard, number: int) -> None:
    """That of one bucket, in a slot of its own where there are so many; what attends in a way of its own from the
    second time on, twice.
    """
    bucket = shard.buckets[number]
    step = Step((Segment(number % shard.slots, 0, 1),), bucket)
    with torch.inference_mode(), current(shard.device):
        for _ in range(2 if bucket <= ALONE else 1):
            shard.forward(step, torch.zeros(1, dtype=torch.int64))


def gpu_of(plan: Sequence[Placement]) -> torch.device | None:
    """The first one of this process."""
    return next((one.device for one in plan if one.local and one.device.type == "cuda"), None)


@contextmanager
def picking_beside(plan: Sequence[Placement], vocab: int) -> Iterator[None]:
    """On a GPU, a thread of its own picks tokens in every way meanwhile: torch loads what an operation launches when it
    is first asked for it, 0.3 s in all, and the driver keeps others that launch something waiting for that, but not the
    interpreter. So this is for while the lane has little to launch. Not beside a processor that has layers, too: what
    it proves is timed. What goes wrong here goes wrong again where it matters.
    """
    device, picked = gpu_of(plan), list[Future[None]]()
    with ThreadPoolExecutor(1, "picks") as beside:
        if device is not None:
            keep_compiled()
            picked.append(beside.submit(pick_once, device, vocab, first=nothing_compiled()))
        if any(one.local and one.device.type == "cpu" for one in plan):
            wait(picked)
        yield
    for error in filter(None, (one.exception() for one in picked)):
        log.debug("what picks tokens is loaded later: %s", error)


def pick_once(device: torch.device, vocab: int, *, first: bool) -> None:
    """first: nobody has ever compiled anything."""
    build_compiler().start_key().join()
    if first:
        compile_first([partial(pick_some, device, vocab)])
    for one in pick_some(device, vocab):
        one.read()


def pick_some(device: torch.device, vocab: int) -> list[Picking]:
    """In every way, all of them at once, and each by itself."""
    with torch.inference_mode(), current(device):
        logits = torch.zeros(len(PICKED), vocab, device=device)
        rows = [Draw(Sampler(sampling, (0,), vocab, device), 1) for sampling in PICKED]
        for row in rows:
            row.sampler.append([0] * (PENDING + 1))
        build_step_pacer(device).beat()  # as what picks does, it loads something
        return [start_picking(logits, asked) for asked in (rows, *([row] for row in rows))]


def warm_up(shard: Pipeline, draft: DraftModel | None, most_rows: int) -> None:
    """Every bucket, and every shape that a draft that is here proposes in. most_rows: of one batched decode step."""
    passes = max(PASSES[device.type] for device in shard.devices)
    with pause_collector() if passes > 1 else nullcontext():  # once, and not for each graph
        _warm_up(shard, draft, most_rows, passes)


def _warm_up(shard: Pipeline, draft: DraftModel | None, most_rows: int, passes: int) -> None:
    # What is told apart by how it attends, attends in a way of its own from the second time on.
    alone = (1, 1, 2) if passes > 1 else (1,)
    each = ((bucket, rows) for bucket in shard.buckets for rows in (alone if bucket <= ALONE else (1,)))
    sizes = [(bucket, rows) for bucket, rows in each if rows <= bucket]  # `--numerics fast` has one of a single row
    for behind in reversed(range(passes)):
        give_back(shard.devices)
        with run_one_of_each() if behind else nullcontext():
            for bucket, rows in sizes:
                take_steps(shard, draft, bucket, rows, logits=bucket <= most_rows)
    if isinstance(draft, CachedDraft):
        rehearse(draft, shard.slots, most_rows, passes)


def take_steps(shard: Pipeline, draft: DraftModel | None, bucket: int, rows: int, *, logits: bool) -> None:
    """A prompt's, and one that logits are asked of."""
    segments, tokens = (Segment(0, 0, rows),), torch.zeros(rows, dtype=torch.int64)
    step = Step(segments, bucket, rows_only=True)
    left = shard.forward(step, tokens)
    if draft is not None:
        draft.extend(step, tokens, left.aux_hidden_states)
    if logits:
        step = Step(segments, bucket)
        shard.logits(step, shard.forward(step, tokens).hidden)


def give_back(devices: Iterable[torch.device]) -> None:
    """What loading has left over, and then what steps have: a graph that is recorded has memory of its own and cannot
    have that.
    """
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def warm_up_apart(draft: CachedDraft[Any], room: Room, most_rows: int) -> None:
    """The same of a draft without its target, by the process that it is in: rows come projected."""
    passes, token = PASSES[draft.device.type], torch.zeros(1, dtype=torch.int64)
    width = draft.hidden_size
    for bucket in room.buckets * passes:
        draft.take(Step((Segment(0, 0, 1),), bucket), token, torch.zeros(1, width, dtype=draft.dtype))
    rehearse(draft, room.slots, most_rows, passes)


def rehearse(draft: CachedDraft[Any], slots: int, most_rows: int, passes: int) -> None:
    shapes = list(draft.rehearsals(slots, most_rows))
    for _ in range(passes):
        give_back((draft.device,))
        for requests in shapes:
            draft.propose(requests, first_tokens)
