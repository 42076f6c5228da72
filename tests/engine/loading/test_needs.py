"""Tests of the estimates that are made before a model is loaded: the ledger charges the same after the load, and they
decide whatever no option says.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adapters import demo
from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.background_load import load_target
from engine.loading.drafts.find_draft import find_draft
from engine.loading.memory.device_survey import Placement, choose_state_checkpoints, plan_placement
from engine.loading.memory.memory_fit import Fit
from engine.loading.memory.packed_estimate import leave_out_experts, log_unpacked_weights
from engine.loading.memory_estimate import (
    choose_fit,
    estimate_needs,
    estimate_weights,
    hosts_embedding,
    measure_available,
)
from engine.settings.options import Options, build_options
from tests.models.checkpoints import save_qwen3

pytestmark = pytest.mark.usefixtures("rates_are_given")

CONFIG = Checkpoint.open(demo.FOLDER).config
CPU, F32 = torch.device("cpu"), torch.float32
FOUR_BITS = 4.25  # of a weight with a scale and a least step for 128 columns, which a GPU keeps in one word


@pytest.fixture(autouse=True)
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


async def test_the_ledger_charges_what_was_reckoned(tmp_path: Path) -> None:
    save_qwen3(tmp_path / "model", max_position_embeddings=512)
    how = {"disk_prefix_cache": "off", "host_cache_budget": 0, "chunk": 64}
    options = build_options(model=str(tmp_path / "model"), device="cpu", **how)
    target = await load_target(options)
    try:
        ledger = target.build_ledger(0)
        (need,) = estimate_needs(
            options, target.checkpoint.config, F32, plan_placement(options.placement, target.checkpoint.config), None
        )
        assert (target.settings.slots, target.settings.max_context) == (16, 512)
        assert ledger.slots["target"] == 16 * (512 * need.row + need.state)
        weights, buffers = ledger.models["target"].device, ledger.buffers["target"]
        assert weights <= need.fixed <= weights + 4 * buffers
        assert need.compute_taken(Fit(16, 512)) >= ledger.slots["target"] + weights
    finally:
        await target.close()


@pytest.mark.parametrize(
    ("there", "asked", "served"),
    [
        (1 << 40, {}, (16, 32768)),  # all of what the demo can read
        (6 << 30, {}, (8, 32768)),
        (4 << 30, {}, (4, 32768)),
        (1 << 40, {"slots": 9, "max_ctx": 100}, (9, 100)),
        (145 << 20, {}, (1, 16384)),
        (145 << 20, {"slots": 4}, (4, 4096)),
        (1 << 20, {}, (1, 1024)),
    ],
)
def test_what_nobody_chose_is_what_there_is_room_for(
    there: int,
    asked: dict[str, int],
    served: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.loading.memory_estimate.measure_available", lambda _: there)
    options = build_options(device="cpu", **asked)
    with caplog.at_level(logging.WARNING, "rekindle"):
        found = choose_fit(options, CONFIG, F32, plan_placement(options.placement, CONFIG), None)
    assert (found.slots, found.context) == served
    assert ("--max-ctx: 4096 of the model's 32768 tokens" in caplog.text) == (asked == {"slots": 4})
    assert ("can be had" in caplog.text) == (there == 1 << 20)


def test_each_device_is_charged_for_its_own_layers_and_the_last_one_for_the_draft() -> None:
    options = build_options(target_devices="cpu,cpu", target_layer_split="1,1")
    plan = plan_placement(options.placement, CONFIG)
    (both,) = estimate_needs(options, CONFIG, F32, plan, None)
    (one,) = estimate_needs(
        build_options(device="cpu"), CONFIG, F32, plan_placement(build_options(device="cpu").placement, CONFIG), None
    )
    assert (both.row, both.state) == (one.row, one.state)
    draft = find_draft(build_options(device="cpu"), Checkpoint.open(demo.FOLDER))
    assert draft is not None
    (drafted,) = estimate_needs(options, CONFIG, F32, plan, draft)
    assert drafted.row == both.row + draft.shape.kv_bytes_per_token(F32)
    assert drafted.fixed > both.fixed + 4 * draft.weights


def test_a_draft_apart_is_charged_where_it_is_with_copies_of_the_embedding_and_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.loading.memory_estimate.measure_available", lambda _: 1 << 40)
    monkeypatch.setattr("engine.loading.memory_estimate.choose_itemsize", lambda *_: 4)
    draft = find_draft(Options(), Checkpoint.open(demo.FOLDER))
    assert draft is not None
    plan = (Placement(range(CONFIG.num_layers), torch.device("cuda:0")),)
    together = estimate_needs(Options(), CONFIG, F32, plan, draft)
    own, apart = estimate_needs(build_options(draft_device="cpu"), CONFIG, F32, plan, draft)
    assert [one.name for one in together] == ["cuda:0"]
    assert (own.name, apart.name) == ("cuda:0", "cpu")
    copied = 2 * CONFIG.vocab_size * CONFIG.hidden_size * 4
    assert own.fixed + apart.fixed == together[0].fixed + copied
    assert own.row + apart.row == together[0].row
    assert apart.row == draft.shape.kv_bytes_per_token(F32)


@pytest.mark.parametrize(("share", "tied", "away"), [(3, False, False), (1, False, True), (1, True, False)])
def test_where_weights_leave_less_than_half_of_a_gpu_the_embedding_stays_on_the_host(
    monkeypatch: pytest.MonkeyPatch, share: int, tied: bool, away: bool
) -> None:
    config = Qwen3Config(1000, 64, 128, 2, 4, 2, 16, 512, 1e6, tie_word_embeddings=tied)
    plan = (Placement(range(2), torch.device("cuda:0")),)
    whole = estimate_weights(config, F32, torch.device("cuda:0"), range(2))
    monkeypatch.setattr("engine.loading.memory_estimate.measure_allowed", lambda _: share * whole)
    monkeypatch.setattr("engine.loading.memory_estimate.measure_available", lambda _: share * whole)
    table = 1000 * 64 * 4 if away else 0
    assert hosts_embedding(config, F32, plan, {}) == away
    gpu, *host = estimate_needs(build_options(max_ctx=512, slots=1), config, F32, plan, None)
    assert [(one.name, one.fixed, one.row) for one in host] == ([("cpu", table, 0)] if away else [])
    monkeypatch.setattr("engine.loading.memory_estimate.hosts_embedding", lambda *_: False)
    assert gpu.fixed == estimate_needs(build_options(max_ctx=512, slots=1), config, F32, plan, None)[0].fixed - table


def test_what_torch_may_take_of_a_gpu_is_all_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=100 << 30))
    monkeypatch.setattr("engine.loading.memory_estimate.free_memory", lambda _: 90 << 30)
    for share, left in ((1.0, 80), (0.5, 45), (0.05, 4)):
        monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda _, share=share: share)
        assert measure_available(gpu) == left << 30


def test_a_large_gpu_keeps_more_states_of_recurrent_layers_than_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 2 MiB there. What was asked for is kept in any case."""
    layers, bf16 = range(CONFIG.num_layers), torch.bfloat16
    monkeypatch.setattr(type(CONFIG), "state_bytes", lambda *_: (3 << 20, 2 << 20))
    there = {"cuda:0": 0, "cuda:1": 1200 << 20}
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=there[str(device)])
    )
    one = [Placement(layers, torch.device("cuda:0"))]
    for total, count in ((100, 8), (400, 8), (1200, 24), (8000, 32)):
        there["cuda:0"] = total << 20
        assert choose_state_checkpoints(None, CONFIG, bf16, one) == count
        assert choose_state_checkpoints(3, CONFIG, bf16, one) == 3
    assert choose_state_checkpoints(None, CONFIG, bf16, [*one, Placement(layers, torch.device("cuda:1"))]) == 24
    assert choose_state_checkpoints(None, CONFIG, bf16, [*one, Placement(layers, torch.device("cpu"))]) == 8


def test_packed_weights_take_their_own_room_of_a_gpu() -> None:
    config = Qwen3Config(1000, 512, 1280, 2, 8, 2, 64, 2048, 1e6, tie_word_embeddings=True)
    four, eight = StepLayout("uint4", 128, least="scale"), StepLayout("int8", 32)
    other = StepLayout("e4m3", 32, scale="float32")  # which no kernel is for
    shapes, bf16, gpu, whole = config.tensors(), torch.bfloat16, torch.device("cuda"), range(2)
    plain = estimate_weights(config, bf16, gpu, whole)
    assert plain == sum(2 * math.prod(shape) for shape in shapes.values())
    layouts = {name: four for name in shapes if name.endswith("_proj.weight")}
    layouts["model.layers.1.mlp.up_proj.weight"] = eight  # so neither it nor what it gates stays packed
    layouts["model.layers.0.mlp.down_proj.weight"] = other
    kept = [name for name in layouts if not ("1.mlp" in name and "down" not in name) and layouts[name] != other]
    counts = {name: math.prod(shapes[name]) for name in kept}
    expected = plain - sum(count * (2 - FOUR_BITS / 8) for count in counts.values())
    assert estimate_weights(config, bf16, gpu, whole, layouts) == pytest.approx(expected)
    assert estimate_weights(config, F32, gpu, whole, layouts) == 2 * plain
    layouts["model.embed_tokens.weight"] = eight  # its head is packed, in addition to the table
    head = 1000 * 512 * 8.5 / 8
    assert estimate_weights(config, bf16, gpu, range(1, 2), layouts) == pytest.approx(
        estimate_weights(config, bf16, gpu, range(1, 2), {**layouts, "model.embed_tokens.weight": other}) + head
    )


def test_packed_experts_take_their_own_room_of_a_gpu_but_not_in_host_memory() -> None:
    shape = ExpertsShape(8, 2, 256, is_normalized=True)
    config = Qwen3MoeConfig(1000, 512, 1280, 2, 8, 2, 64, 2048, 1e6, experts=shape)
    four = StepLayout("uint4", 128, least="scale")
    shapes = config.tensors()
    layouts = {name: four for name in shapes if ".experts." in name}
    numbers = sum(math.prod(shapes[name]) for name in layouts)
    plain, packed = (
        estimate_weights(config, torch.bfloat16, torch.device("cuda"), range(2), own) for own in ({}, layouts)
    )
    assert packed == pytest.approx(plain - numbers * (2 - FOUR_BITS / 8))
    assert leave_out_experts({**layouts, "lm_head.weight": four}) == {"lm_head.weight": four}


def test_packed_weights_that_a_gpu_unpacks_are_said(caplog: pytest.LogCaptureFixture) -> None:
    config = Qwen3Config(1000, 512, 1280, 1, 8, 2, 64, 2048, 1e6)
    four = StepLayout("uint4", 128, least="scale")
    matrices = [name for name in config.tensors() if name.endswith("_proj.weight")]
    forms = {name: "Q3_K" if "down_proj" in name else "awq" for name in matrices}
    checkpoint = SimpleNamespace(
        config=config,
        layouts={name: four for name in matrices if forms[name] == "awq"},
        tensors={name: SimpleNamespace(packing_name=form) for name, form in forms.items()},
    )
    plan = [Placement(range(1), torch.device("cuda"))]
    with caplog.at_level(logging.INFO):
        log_unpacked_weights(checkpoint, torch.bfloat16, [Placement(range(1), CPU)])  # type: ignore[arg-type]
        assert not caplog.records
        log_unpacked_weights(checkpoint, torch.bfloat16, plan)  # type: ignore[arg-type]
    assert "so they are unpacked: Q3_K (1.2 MiB)" in caplog.text
