"""Creates kernels, graphs and buffers before a request waits for them: serving would create them at first use."""

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
from attrs import evolve

from adapters.device.sampling.sampler import Draw, LaunchedPicks, Sampler, start_picking
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.shard import Shard, ShardPlacement, list_buckets
from adapters.models.drafts.cached_draft import CachedDraft, pick_first_tokens
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.collector_pause import pause_collector
from adapters.models.kernels.cuda_capability import read_capability
from adapters.models.kernels.factory import build_compiler, build_step_pacer
from adapters.models.kernels.formats.row_format import RowTypes
from adapters.models.kernels.interfaces.layer_interface import ALONE
from adapters.models.kernels.interfaces.sampling_interface import PENDING
from adapters.models.kernels.layer_kinds import run_one_of_each
from adapters.models.kernels.step import UNSETTLED, Segment, Step
from adapters.models.numerics.layer_bench import PROBED_SLOTS
from adapters.models.numerics.probe import buckets_of, probe_key
from adapters.models.numerics.synthetic import RandomWeights, packed_in
from adapters.models.open_checkpoint import Checkpoint
from effects.ids import PAGE
from effects.job import Sampling
from engine.loading.memory.device_survey import Placement, build_kernels, is_compile_cache_empty, set_compile_cache
from engine.loading.memory.memory_fit import Fit
from engine.loading.prove_numerics import build_probe_shape
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.output import start_progress

log = logging.getLogger("rekindle")

SAMPLINGS = (
    Sampling(logprobs=1),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01),
    Sampling(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, logit_bias=((0, 1.0),)),
)
# Seconds in which a step's compiled kernels are read at most. A step that takes longer is compiling.
READING_S = 0.2
# On a GPU the first pass makes kernels and buffers. The second pass records a graph and replays it.
PASSES = {"cpu": 1, "cuda": 2}


def compile_kernels(
    checkpoint: Checkpoint,
    plan: Sequence[Placement],
    dtype: torch.dtype,
    *,
    rows: RowTypes,
    fit: Fit,
    chunk: int,
    kept: CalibrationCache,
    on_step: start_progress.StepListener,
) -> None:
    """Compile what steps of each bucket launch on a GPU, side by side, or read what an earlier start compiled.

    Later in the process the kernels would be compiled one after the other. The steps run one layer of each kind of the
    model, with random weights. If nothing was proven yet they are taken twice, the first time without a launch
    (`compile_first`). What fails here fails again where it matters.

    kept: outcomes of the probe, which launches kernels that nothing else launches.
    """
    device = find_gpu(plan)
    if device is None:
        return
    compiler = build_compiler()
    capability = read_capability(device)
    answers = (compiler.start_key(), compiler.start_tool_versions(10 * capability.major + capability.minor))
    buckets = buckets_of(list_buckets(device), chunk)
    asked = build_probe_shape(checkpoint, device, (dtype, rows), chunk, fit.context)
    probed = kept.has_proof(probe_key(checkpoint.family, checkpoint.config, build_kernels(device, dtype), asked))
    plain = ShardPlacement(
        device=device, dtype=dtype, rows=rows, buckets=buckets, capacity=fit.context, slots=PROBED_SLOTS
    )
    paged = [evolve(plain, slots=fit.slots, pages=-(-fit.context // PAGE))] if fit.pages else []
    placements = paged if paged and probed else [plain, *paged]
    with torch.inference_mode(), use_device(device):
        for small, layers, own in packed_in(checkpoint.config.list_probed_layers(), checkpoint.layouts):
            weights = RandomWeights(small, 1, device, dtype, layouts=own)
            shards = list[Shard]()
            try:
                for placement in placements:
                    kernels = build_kernels(device, dtype)
                    kernels.graphs.enabled = False  # type: ignore[attr-defined] # these are Triton's
                    shards.append(checkpoint.family.build(small, weights, kernels, evolve(placement, layers=layers)))
            except torch.OutOfMemoryError as error:
                log.debug("kernels will be compiled when they are first used: %s", error)
            for thread in answers:
                thread.join()
            on_step(start_progress.COMPILE)
            steps = [
                partial(compile_step, *shard_and_bucket) for shard_and_bucket in product(shards, range(len(buckets)))
            ]
            if not probed:
                compile_first(steps)
            run_side_by_side(steps)
            for shard in shards:
                shard.synchronize()
                shard.close()


def digest_beside(checkpoint: Checkpoint, work: Callable[[], None]) -> str:
    """Return the digest of the weights, computed on a thread while this thread does `work`."""
    with ThreadPoolExecutor(1, "digest") as executor:
        digest = executor.submit(checkpoint.digest)
        work()
    return digest.result()


def compile_first(steps: Sequence[Callable[[], object]]) -> None:
    """Have other processes compile what these steps launch, without launching anything. For an empty compile cache."""
    with ThreadPoolExecutor(1, "compile-first") as thread:
        log_failures([thread.submit(copy_context().run, compile_requested, steps)])


def compile_requested(steps: Sequence[Callable[[], object]]) -> None:
    """Take the steps without launches, and compile in other processes what they asked for."""
    with build_compiler().collect_requests() as requests, ThreadPoolExecutor(1, "asking") as thread:
        begun = [thread.submit(copy_context().run, step) for step in steps]
    log_failures(begun)
    requests.compile_in_processes()


def log_failures(steps: Iterable[Future[Any]]) -> None:
    """Log what could not be compiled; it is compiled later."""
    for error in filter(None, (future.exception() for future in steps)):
        log.debug("some kernels will be compiled when they are first used: %s", error)


def run_side_by_side(steps: Sequence[Callable[[], None]]) -> None:
    """Run steps on threads of their own.

    Each begins when the one before it has ended, until one takes so long that it must be compiling; a kernel that
    several need is compiled once. Reading compiled kernels needs the interpreter for 0.15 s in all. Threads that read
    side by side take three times as long.
    """
    with build_compiler().compile_in_threads(), ThreadPoolExecutor(len(steps) or 1, "first-steps") as threads:
        begun = list[Future[None]]()
        only_read = True
        for step in steps:
            begun.append(threads.submit(copy_context().run, step))
            only_read = only_read and bool(wait(begun[-1:], READING_S).done)
    log_failures(begun)


def compile_step(shard: Shard, number: int) -> None:
    """Run a step of one bucket, in a slot of its own if there are enough.

    A bucket that attends in a different way from the second time on runs twice. Recurrent layers have kernels for
    further kinds of steps.
    """
    bucket = shard.spec.buckets[number]
    step = Step((Segment(number % shard.spec.slots, 0, 1),), bucket)
    with torch.inference_mode(), use_device(shard.spec.device):
        for _ in range(2 if bucket <= ALONE else 1):
            shard.forward(step, torch.zeros(1, dtype=torch.int64))
        for counts in list_settling_kinds(shard, bucket):
            slots = range(number, number + len(counts))
            segments = tuple(
                Segment(slot % shard.spec.slots, 0, rows) for slot, rows in zip(slots, counts, strict=True)
            )
            shard.forward(Step(segments, bucket), torch.zeros(sum(counts), dtype=torch.int64))


def find_gpu(plan: Sequence[Placement]) -> torch.device | None:
    """Return the first GPU of this process, or None."""
    return next(
        (placement.device for placement in plan if placement.is_local and placement.device.type == "cuda"), None
    )


@contextmanager
def warm_up_sampling(plan: Sequence[Placement], vocab: int) -> Iterator[None]:
    """Sample tokens in every way on a thread, while the lane has little to launch.

    torch loads what an operation launches at its first use, 0.3 s in all. The driver blocks other launches meanwhile,
    but not the interpreter. If a CPU has layers too, this ends before they are proven, since that is timed. What fails
    here fails again where it matters.
    """
    device = find_gpu(plan)
    picked = list[Future[None]]()
    with ThreadPoolExecutor(1, "picks") as executor:
        if device is not None:
            set_compile_cache()
            picked.append(executor.submit(sample_in_every_way, device, vocab, first=is_compile_cache_empty()))
        if any(placement.is_local and placement.device.type == "cpu" for placement in plan):
            wait(picked)
        yield
    for error in filter(None, (future.exception() for future in picked)):
        log.debug("the sampler will be loaded when it is first used: %s", error)


def sample_in_every_way(device: torch.device, vocab: int, *, first: bool) -> None:
    """Sample and wait for the results. first: no kernel was ever compiled here."""
    build_compiler().start_key().join()
    if first:
        compile_first([partial(sample_each, device, vocab)])
    for launched_picks in sample_each(device, vocab):
        launched_picks.read()


def sample_each(device: torch.device, vocab: int) -> list[LaunchedPicks]:
    """Sample in every way, all of them at once, and each by itself."""
    with torch.inference_mode(), use_device(device):
        logits = torch.zeros(len(SAMPLINGS), vocab, device=device)
        rows = [Draw(Sampler(sampling, (0,), vocab, device), 1) for sampling in SAMPLINGS]
        for row in rows:
            row.sampler.append([0] * (PENDING + 1))
        # It opens a library at first use, like picking.
        build_step_pacer(device).beat()
        return [start_picking(logits, asked) for asked in (rows, *([row] for row in rows))]


def warm_up(shard: Pipeline, draft: DraftModel | None, most_rows: int) -> None:
    """Run every bucket, and every shape of the draft. most_rows: of one batched decode step."""
    passes = max(PASSES[device.type] for device in shard.devices)
    # The collector is paused for all graphs together, and not for each of them.
    with pause_collector() if passes > 1 else nullcontext():
        run_all_shapes(shard, draft, most_rows, passes)


def run_all_shapes(shard: Pipeline, draft: DraftModel | None, most_rows: int, passes: int) -> None:
    # Small buckets run with one row twice, then with two: forwards of few rows, each in a slot of its own, attend in
    # another way from the second one on.
    alone = (1, 1, 2) if passes > 1 else (1,)
    shapes = ((bucket, rows) for bucket in shard.spec.buckets for rows in (alone if bucket <= ALONE else (1,)))
    sizes = [(bucket, rows) for bucket, rows in shapes if rows <= bucket]  # `--numerics fast` has one of a single row
    for passes_left in reversed(range(passes)):
        release_cached_memory(shard.devices)
        with run_one_of_each() if passes_left else nullcontext():
            for bucket, rows in sizes:
                run_steps(shard, draft, bucket, rows, logits=bucket <= most_rows)
            for bucket in shard.spec.buckets:
                run_settling_steps(shard, bucket)
    if isinstance(draft, CachedDraft):
        rehearse_proposals(draft, shard.spec.slots, most_rows, passes)


def run_steps(shard: Pipeline, draft: DraftModel | None, bucket: int, rows: int, *, logits: bool) -> None:
    """Run a step of a prompt, and one with decode rows: its logits are needed, or rows of prompts may share it."""
    segments = (Segment(0, 0, rows),)
    tokens = torch.zeros(rows, dtype=torch.int64)
    step = Step(segments, bucket, rows_only=True)
    left = shard.forward(step, tokens)
    if draft is not None:
        draft.extend(step, tokens, left.aux_hidden_states)
    if logits:
        step = Step(segments, bucket)
        shard.logits(step, shard.forward(step, tokens).hidden)
    elif draft is None and shard.launches_ahead and not shard.states.specs:
        shard.forward(Step(segments, bucket), tokens)
        if shard.spec.slots > 1 and bucket > UNSETTLED:  # a decode row with rows of a prompt
            shared = (Segment(1, 0, 1), Segment(0, 0, UNSETTLED))
            shard.forward(Step(shared, bucket), torch.zeros(UNSETTLED + 1, dtype=torch.int64))


def run_settling_steps(shard: Pipeline, bucket: int) -> None:
    """Run the further kinds of steps that models with recurrent layers have."""
    for counts in list_settling_kinds(shard, bucket):
        step = Step(tuple(Segment(slot, 0, count) for slot, count in enumerate(counts)), bucket)
        shard.forward(step, torch.zeros(step.rows, dtype=torch.int64))
        shard.commit(step, counts)


def list_settling_kinds(shard: Shard, bucket: int) -> list[tuple[int, ...]]:
    """Return the rows of each slot in further kinds of steps (`StateBatch.kind`), for models with recurrent layers.

    They are several rows that do not settle, rows that settle and leave the last ones in the rings, and both. Wide
    steps of the first kind are recorded at their first use.
    """
    if not (shard.states.specs and shard.states.commits_per_segment):
        return []
    kinds: list[tuple[int, ...]] = [(2,)] if 2 <= bucket <= 2 * UNSETTLED else []
    settled = min(2 * UNSETTLED, bucket - 1, shard.spec.capacity)
    if settled > UNSETTLED:
        kinds.append((settled,))
        if bucket < shard.spec.buckets[-1] and shard.spec.slots > 1:  # a mixed forward is narrower than a chunk
            kinds.append((settled, 1))
    return kinds


def release_cached_memory(devices: Iterable[torch.device]) -> None:
    """Return memory that torch caches. A recorded graph has memory of its own and cannot use what is cached."""
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def warm_up_own_draft(draft: CachedDraft[Any], placement: DraftPlacement, most_rows: int) -> None:
    """Run every shape of a draft in its own process, without its target: rows come projected."""
    passes = PASSES[draft.device.type]
    token = torch.zeros(1, dtype=torch.int64)
    width = draft.hidden_size
    for bucket in tuple(placement.buckets) * passes:
        draft.extend_projected(Step((Segment(0, 0, 1),), bucket), token, torch.zeros(1, width, dtype=draft.dtype))
    rehearse_proposals(draft, placement.slots, most_rows, passes)


def rehearse_proposals(draft: CachedDraft[Any], slots: int, most_rows: int, passes: int) -> None:
    """Make proposals in every shape that the draft has."""
    shapes = list(draft.list_rehearsals(slots, most_rows))
    for _ in range(passes):
        release_cached_memory((draft.device,))
        for requests in shapes:
            draft.propose(requests, pick_first_tokens)
            draft.launch_proposals(requests, lambda logits, _: logits.argmax(-1))
