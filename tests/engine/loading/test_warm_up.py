"""Tests of the kernels that a start compiles early: those of the probe, and those that serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import demo
from adapters.device.lane.buckets import bucket_of
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement, list_buckets
from adapters.models.kernels.cuda.tiles import rows_to_plan
from adapters.models.kernels.formats.row_format import row_types
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.probe import buckets_of, probe_key
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.memory.device_survey import Placement, build_kernels, is_compile_cache_empty
from engine.loading.memory.memory_fit import Fit
from engine.loading.prove_numerics import build_probe_shape
from engine.loading.warm_up import compile_first, compile_kernels, warm_up
from engine.settings.calibration_cache import CalibrationCache

CHUNK, FIT = 1024, Fit(5, 2048, pages=12)


def compiled(device: torch.device, folder: Path, *, probed: bool = False) -> Sequence[str]:
    """Return the steps that the compilation reported. probed: an earlier start has kept the result of the probe."""
    checkpoint, heard = Checkpoint.open(demo.FOLDER), list[str]()
    plan = (Placement(range(checkpoint.config.num_layers), device),)
    dtype, kept = torch.bfloat16, CalibrationCache(folder)
    if probed:
        shape = build_probe_shape(checkpoint, device, (dtype, row_types(dtype)), CHUNK, FIT.context)
        key = probe_key(checkpoint.family, checkpoint.config, build_kernels(device, dtype), shape)
        assert kept.load_or_make(key, lambda: "found", str, str) == "found"
    how = {"rows": row_types(dtype), "fit": FIT, "chunk": CHUNK, "kept": kept}
    compile_kernels(checkpoint, plan, dtype, **how, on_step=lambda step, *_: heard.append(step))
    return heard


def test_a_cpu_has_nothing_to_compile(tmp_path: Path) -> None:
    assert not compiled(torch.device("cpu"), tmp_path)


def test_what_cannot_be_compiled_before_is_told_and_no_reason_not_to_start(caplog: pytest.LogCaptureFixture) -> None:
    """Neither what a step says, nor that there is no Triton."""

    def wrong() -> None:
        raise RuntimeError("a step that fails")

    caplog.set_level(logging.DEBUG, "rekindle")
    compile_first([wrong])
    [message] = [one.getMessage() for one in caplog.records if "will be compiled when" in one.getMessage()]
    assert ("a step that fails" if find_spec("triton") else "triton") in message


def test_only_an_empty_folder_says_that_nothing_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert not is_compile_cache_empty()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert is_compile_cache_empty()
    (tmp_path / "kernel").mkdir()
    assert not is_compile_cache_empty()


@pytest.mark.parametrize(
    ("bucket", "rows"), [(1, 128), (100, 128), (128, 128), (129, 1024), (1024, 1024), (1025, 2048), (4096, 4096)]
)
def test_tiles_of_all_usual_buckets_are_planned_by_two_kernels(bucket: int, rows: int) -> None:
    assert rows_to_plan(bucket) == rows


@pytest.mark.cuda
@pytest.mark.parametrize("probed", [False, True])
def test_steps_of_every_bucket_find_their_kernels_compiled(
    probed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from triton import knobs  # noqa: PLC0415 - needs Triton, so a GPU build

    device = torch.device("cuda", 0)
    assert compiled(device, tmp_path, probed=probed) == ["compiling kernels"]
    late = list[str]()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: late.append(about["repr"]))
    checkpoint, buckets = Checkpoint.open(demo.FOLDER), buckets_of(list_buckets(device), CHUNK)
    how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "buckets": buckets}
    how |= {"slots": FIT.slots, "capacity": FIT.context, "pages": FIT.pages}
    kernels = build_kernels(device, torch.bfloat16)
    shard = checkpoint.family.build(checkpoint.config, checkpoint, kernels, ShardPlacement(**how))
    with torch.inference_mode():
        for bucket, rows in product(buckets, (1, 2)):
            if rows > bucket:
                continue
            shard.forward(Step((Segment(0, 0, rows),), bucket), torch.zeros(rows, dtype=torch.int64))
    shard.close()
    assert late == []


@pytest.mark.cuda
def test_steps_behind_a_start_find_their_graphs_recorded() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, checkpoint = torch.device("cuda", 0), Checkpoint.open(demo.FOLDER)
    kernels = build_kernels(device, torch.bfloat16)
    how: dict[str, Any] = {
        "device": device,
        "dtype": torch.bfloat16,
        "buckets": buckets_of(list_buckets(device), CHUNK),
    }
    how |= {"slots": FIT.slots, "capacity": FIT.context, "pages": FIT.pages}
    shard = Pipeline([checkpoint.family.build(checkpoint.config, checkpoint, kernels, ShardPlacement(**how))])
    warm_up(shard, None, 32)
    graphs = kernels.graphs  # type: ignore[attr-defined] # these are Triton's
    # What has run once and is not recorded must be recorded at its next use, so no step may need it.
    seen, recorded = set(graphs._seen), set(graphs._graphs)  # noqa: SLF001
    for spans in ([(5, 1)], [(7, 1), (3, 1)], [(0, 2)], [(6, 3), (2, 1)], [(4, 1)] * 5, [(0, 9)]):
        segments = tuple(Segment(slot, *span) for slot, span in enumerate(spans))
        rows = sum(count for _, count in spans)
        for rows_only in (False, True) if len(spans) == 1 else (False,):
            step = Step(segments, bucket_of(shard.spec.buckets, rows), rows_only=rows_only)
            left = shard.forward(step, torch.zeros(rows, dtype=torch.int64))
            shard.logits(step, left.hidden)
    assert recorded
    assert set(graphs._graphs) == recorded  # noqa: SLF001
    assert graphs._seen == seen  # noqa: SLF001
    shard.close()


@pytest.mark.parametrize("folder", [demo.FOLDER, demo.FOLDER / "hybrid"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_steps_behind_a_start_compute_all_that_steps_without_one_do(device: str, folder: Path) -> None:
    """On a GPU: what was recorded for narrow steps and wide ones leaves nothing out."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    where, checkpoint = torch.device(device), Checkpoint.open(folder)
    how: dict[str, Any] = {"device": where, "dtype": torch.bfloat16, "buckets": buckets_of(list_buckets(where), CHUNK)}
    how |= {"slots": FIT.slots, "capacity": FIT.context, "pages": FIT.pages}
    started, fresh = (
        Pipeline(
            [
                checkpoint.family.build(
                    checkpoint.config, checkpoint, build_kernels(where, torch.bfloat16), ShardPlacement(**how)
                )
            ]
        )
        for _ in range(2)
    )
    pages = {slot: [2 * slot, 2 * slot + 1] for slot in range(FIT.slots)}
    for shard in (started, fresh):
        if shard is started:
            warm_up(shard, None, 64)
        for slot, own in pages.items():
            shard.rows.seat(slot, slot, 0, own)
    tokens, front = torch.arange(1, 600) % checkpoint.config.vocab_size, 256
    for shard in (started, fresh):
        shard.forward(Step((Segment(0, 0, front),), front, rows_only=True), tokens[:front])
    for spans in ([(front, 1)], [(front, 1), *[(0, 1)] * 4], [(front, 3)], [(front, 7), (0, 1)], [(0, 60)]):
        segments = tuple(Segment(slot, *span) for slot, span in enumerate(spans))
        rows = sum(count for _, count in spans)
        step = Step(segments, bucket_of(started.spec.buckets, rows))
        left = [shard.forward(step, tokens[:rows]) for shard in (started, fresh)]
        assert torch.equal(*(one.hidden[:rows] for one in left))
        logits = [shard.logits(step, one.hidden) for shard, one in zip((started, fresh), left, strict=True)]
        assert torch.equal(*(one[:rows] for one in logits))
    for count in (60, 300):
        for shard in (started, fresh):
            step = Step((Segment(1, 0, count),), bucket_of(started.spec.buckets, count), rows_only=True)
            shard.forward(step, tokens[:count])
        ours, theirs = (shard.parts[0].rows.export(1, 0, count) for shard in (started, fresh))
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for shard in (started, fresh):
        for part in shard.parts:
            part.close()
