"""`--cpu-experts`: what is refused, what it takes of each memory, who decides with `auto`, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cyclopts
import pytest
import torch

from adapters import demo
from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.expert_products import list_expert_matrices
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels import factory
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from benchmarks.exactness import collect_answer
from effects.job import Job
from effects.scope import Scope
from engine.loading import memory_estimate, place_experts
from engine.loading.background_load import load_target
from engine.loading.calibration.expert_prices import measure_expert_prices
from engine.loading.load_target import LoadedModel
from engine.loading.memory.device_survey import Placement, choose_chunk
from engine.loading.memory.expert_placement import resolve_cpu_experts
from engine.loading.memory.packed_estimate import estimate_cpu_experts
from engine.loading.memory_estimate import estimate_needs
from engine.loading.place_experts import find_least, from_json, place_cpu_experts, to_json
from engine.loading.plan_load import LoadPlan
from engine.serving.announce import describe_costs
from engine.serving.wiring import run_engine
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.config_file import parse_values
from engine.settings.options import build_options
from engine.settings.user_error import UserError
from states.experts import ExpertPlacement, ExpertPrices
from tests.engine.loading.memory.test_experts import answers, saved

pytestmark = pytest.mark.usefixtures("rates_are_given")

GPU = torch.device("cuda")
CPU = torch.device("cpu")
DTYPE = torch.bfloat16
EXPERTS = ExpertsShape(11, 3, 256, is_normalized=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("experts") / "m")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    """Three layers of 16 experts of 24,576 weights each."""
    return Checkpoint.open(folder)


ONE = 3 * 64 * 128 * 2
LAYER = 16 * ONE
ROUTER = 16 * 128 * 2


def plan_of(checkpoint: Checkpoint, *devices: Placement, **options: Any) -> LoadPlan:
    places = devices or (Placement(range(3), GPU),)
    return LoadPlan(build_options(chunk=64, **options), checkpoint, DTYPE, places, None)


def layers_of(plan: LoadPlan) -> list[list[int]]:
    return [list(one.cpu_experts) for one in plan.placements]


@pytest.mark.parametrize("text", ["all", "-1", "1.5", "", "12345", "Auto"])
def test_what_is_no_number_of_layers_is_refused(text: str) -> None:
    with pytest.raises(cyclopts.CycloptsError, match="Must be auto, or a number of layers, such as 24"):
        parse_values({"cpu_experts": text})


def test_layers_are_counted_from_the_first_and_over_all_devices(checkpoint: Checkpoint) -> None:
    halves = Placement(range(2), GPU), Placement(range(2, 3), CPU)
    assert layers_of(place_cpu_experts(plan_of(checkpoint, cpu_experts="0"), None)) == [[]]
    assert layers_of(place_cpu_experts(plan_of(checkpoint, cpu_experts="2"), None)) == [[0, 1]]
    assert layers_of(place_cpu_experts(plan_of(checkpoint, cpu_experts="99"), None)) == [[0, 1, 2]]
    assert layers_of(place_cpu_experts(plan_of(checkpoint, *halves, cpu_experts="3"), None)) == [[0, 1], [2]]


def test_layers_that_cannot_be_here_are_refused(checkpoint: Checkpoint) -> None:
    peer: Any = object.__new__(Peer)
    halves = Placement(range(2), GPU), Placement(range(2, 3), CPU, peer)
    assert layers_of(place_cpu_experts(plan_of(checkpoint, *halves, cpu_experts="2"), None)) == [[0, 1], []]
    with pytest.raises(UserError, match="--cpu-experts 3: some of these layers are in another process"):
        place_cpu_experts(plan_of(checkpoint, *halves, cpu_experts="3"), None)
    dense = Checkpoint.open(demo.FOLDER)
    assert layers_of(place_cpu_experts(plan_of(dense), None)) == [[]]
    with pytest.raises(UserError, match="--cpu-experts 1: the model has no experts; accepted: auto, 0"):
        place_cpu_experts(plan_of(dense, cpu_experts="1"), None)


def test_prompts_come_in_the_chunks_of_a_cpu(checkpoint: Checkpoint) -> None:
    runtime = build_options().runtime
    gpu = [Placement(range(3), GPU)]
    assert choose_chunk(runtime, gpu) == 1024
    assert choose_chunk(runtime, gpu, Checkpoint.open(demo.FOLDER).config) == 1024
    assert choose_chunk(runtime, gpu, checkpoint.config) == 4096
    assert choose_chunk(runtime, [Placement(range(3), GPU, cpu_experts=range(1))], checkpoint.config) == 256


# --- memory ---


@pytest.fixture
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "measure_available", lambda device: 1 << (40 if device.type == "cpu" else 22))
    monkeypatch.setattr(memory_estimate, "measure_allowed", lambda _: 1 << 40)


def needs_of(plan: LoadPlan) -> dict[str, int]:
    asked = estimate_needs(plan.options, plan.checkpoint.config, DTYPE, plan.placements, None)
    return {one.name: one.fixed for one in asked}


@pytest.mark.usefixtures("_memory")
def test_experts_of_the_host_take_none_of_the_device(checkpoint: Checkpoint) -> None:
    whole = needs_of(plan_of(checkpoint))
    found = needs_of(place_cpu_experts(plan_of(checkpoint, cpu_experts="2"), None))
    assert whole.keys() == {"cuda"}
    assert found == {"cuda": whole["cuda"] - 2 * (LAYER + ROUTER), "cpu": 2 * LAYER}
    both = needs_of(place_cpu_experts(plan_of(checkpoint, cpu_experts="2", experts="host:0.001"), None))
    assert both["cpu"] == 3 * LAYER, "of the third layer they are brought from there"
    assert both["cuda"] == found["cuda"] - LAYER + min((1 << 30) // 1000, LAYER + 8 * ONE)
    on_cpu = plan_of(checkpoint, Placement(range(3), CPU), cpu_experts="2")
    assert needs_of(place_cpu_experts(on_cpu, None)) == needs_of(on_cpu)


def test_packed_experts_are_counted_packed() -> None:
    config = Qwen3MoeConfig(160, 256, 96, 3, 4, 2, 64, 512, 1e6, experts=EXPERTS)
    layout = StepLayout("uint4", 32, per=8, inner=True, least="own")
    layouts = {name: layout for _, parts in list_expert_matrices(config) for name, _ in parts}
    weights = 2 * 11 * 3 * 256 * 256
    assert estimate_cpu_experts(config, DTYPE, range(2), {}) == weights * 2
    assert estimate_cpu_experts(config, DTYPE, range(2), layouts) == weights * layout.bits / 8


# --- auto ---


def test_the_least_number_is_found() -> None:
    for least in (1, 3, 4, 9):
        assert find_least([1, 3, 4, 7, 9], lambda count, least=least: count >= least) == least
    assert find_least([1, 3], lambda _: False) is None
    assert find_least([], lambda _: True) is None


@pytest.fixture
def _small_gpu(monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint) -> None:
    """A GPU that misses the experts of a layer and a half, and measures that computing is quicker."""
    [need] = estimate_needs(build_options(chunk=64), checkpoint.config, DTYPE, plan_of(checkpoint).placements, None)
    room = need.fixed + 1024 * (need.row + need.once) - LAYER * 3 // 2
    monkeypatch.setattr(memory_estimate, "measure_available", lambda device: room if device.type == "cuda" else 1 << 40)
    monkeypatch.setattr(place_experts, "build_key", lambda _: "0" * 32)
    monkeypatch.setattr(place_experts, "measure_expert_prices", lambda *_: ExpertPrices(100, 30))


@pytest.mark.usefixtures("_memory", "_small_gpu")
def test_automatically_as_many_layers_leave_the_device_as_it_takes(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"max_ctx": 1024, "slots": 1}
    kept = CalibrationCache(tmp_path)
    assert layers_of(place_cpu_experts(plan_of(checkpoint, **asked), kept)) == [[0, 1]]
    assert layers_of(place_cpu_experts(plan_of(checkpoint, **asked), None)) == [[0, 1]]
    monkeypatch.setattr(place_experts, "measure_expert_prices", lambda *_: pytest.fail("it is known already"))
    assert layers_of(place_cpu_experts(plan_of(checkpoint, **asked), kept)) == [[0, 1]]
    with_more = memory_estimate.measure_available(GPU) + LAYER // 2
    monkeypatch.setattr(memory_estimate, "measure_available", lambda _: with_more)
    assert layers_of(place_cpu_experts(plan_of(checkpoint, **asked), kept)) == [[0, 1]], "the first start decided"
    with_less = with_more - LAYER * 3 // 2
    monkeypatch.setattr(memory_estimate, "measure_available", lambda _: with_less)
    assert layers_of(place_cpu_experts(plan_of(checkpoint, **asked), kept)) == [[0, 1, 2]], "it fits no longer"
    monkeypatch.setattr(memory_estimate, "measure_available", lambda _: 1 << 40)
    assert layers_of(place_cpu_experts(plan_of(checkpoint, **asked), kept)) == [[]], "all fits"


@pytest.mark.usefixtures("_memory", "_small_gpu")
def test_where_the_bus_is_quicker_experts_are_brought(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_experts, "measure_expert_prices", lambda *_: ExpertPrices(100, 20))
    asked = {"max_ctx": 1024, "slots": 1}
    found = place_cpu_experts(plan_of(checkpoint, **asked), CalibrationCache(tmp_path))
    assert layers_of(found) == [[]]
    assert found.options.weights.experts == "host"
    chosen = plan_of(checkpoint, **asked, experts="host:0.001")
    assert place_cpu_experts(chosen, None) == chosen, "who says where experts are is obeyed"


def test_decisions_are_kept_as_text_that_is_checked() -> None:
    for found in (ExpertPlacement(7), ExpertPlacement(brings=True)):
        assert from_json(to_json(found)) == found
    for text in (
        "{}",
        "[]",
        '{"version": 1, "cpu_layers": -1, "brings": false}',
        '{"version": 0, "cpu_layers": 1, "brings": false}',
    ):
        with pytest.raises(ValueError, match="not what this version keeps"):
            from_json(text)


def test_both_prices_are_measured(checkpoint: Checkpoint) -> None:
    found = measure_expert_prices(checkpoint, DTYPE, CPU)
    assert found.compute_ns > 0
    assert found.bring_ns > 0


# --- served: placement, identity, restart, batches, split ---


@pytest.fixture
def _two_arithmetics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device multiplies in another way than the host, as a GPU would."""
    monkeypatch.setattr(factory, "build_kernels", lambda _, dtype: CpuKernels(dtype, own=False))


async def load(folder: Path, cache: Path, **options: Any) -> LoadedModel:
    shape = {"kv_cache_dir": cache, "kv_cache_min_tokens": 0, "host_cache_budget": 0, "chunk": 64, "slots": 2}
    asked = {"max_ctx": 512, "threads": 1, "draft": "none"} | options
    placed = {} if "target_devices" in asked else {"device": "cpu"}
    return await load_target(build_options(**({"model": str(folder)} | shape | placed | asked)))


@pytest.mark.usefixtures("_two_arithmetics")
async def test_a_placement_has_caches_of_its_own_and_finds_them_after_a_restart_with_any_split(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    cache = tmp_path / "kv"
    identities = dict[str, str]()
    restored = dict[str, int]()
    said = dict[str, Any]()
    halves = {"target_devices": "cpu:0,cpu:0", "target_layer_split": "0.4,0.6"}
    for name, options in {
        "none": {},
        "two": {"cpu_experts": "2"},
        "all": {"cpu_experts": "9"},
        "two, split": {"cpu_experts": "2", **halves},
    }.items():
        target = await load(folder, cache, **options)
        try:
            identities[name] = target.identity
            assert target.transfer is not None
            said[name], restored[name] = await answer_and_restore(target)
            hosted = target.shard.memory()["host"]
            layers = {"none": 0, "all": 3}.get(name, 2)
            assert hosted >= layers * LAYER
            assert hosted < (layers + 1) * LAYER
            assert resolve_cpu_experts(build_options(), target.shard).weights.cpu_expert_layers == layers
            shown = [one.cpu_experts for one in target.build_ledger(0).shards]
            assert shown == ([(0, 1), (1, 2)] if "split" in name else [(0, layers)])
            line = describe_costs(target)
            shown = {"none": "", "all": "cpu-experts=layers 0..2"}.get(name, "cpu-experts=layers 0..")
            assert shown in line
            assert ("experts on cpu" in target.numerics.numerics_class) is bool(layers)
        finally:
            await target.close()
    assert len({identities[name] for name in ("none", "two", "all")}) == 3
    assert identities["two"] == identities["two, split"]
    assert said["two"] == said["two, split"]
    assert [restored[name] for name in ("none", "two", "all")] == [0, 0, 0], "nothing of another placement is found"
    assert restored["two, split"] > 0


async def answer_and_restore(target: LoadedModel) -> tuple[Any, int]:
    """Answer a few jobs, one after the other, and tell how many tokens of the first ones' prompts were restored."""
    answers = []
    restored = 0
    async with run_engine(target.settings, target.executor, transfer=target.transfer, paranoid=True) as running:
        for seed in range(2):
            prompt = tuple((seed * 31 + 7 * at) % 150 for at in range(150))
            found = await collect_answer(running, Job(prompt, 12, scope=Scope("full")))
            assert found.report is not None
            restored += found.report.restored_tokens
            answers.append(found.tokens)
    return answers, restored


@pytest.mark.usefixtures("_two_arithmetics")
async def test_other_experts_can_be_brought_beside_those_of_the_host(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is brought, so this is refused there as without."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    with pytest.raises(UserError, match="on a CPU, experts are in host memory anyway"):
        await load(folder, tmp_path / "kv", cpu_experts="1", experts="host")


@pytest.mark.cuda
@pytest.mark.timeout(300)
async def test_on_a_gpu_answers_are_the_same_alone_and_batched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    for _ in range(2):
        target = await load(folder, tmp_path / "kv", cpu_experts="2", device="cuda")
        assert not target.shard.spec.runs_ahead, "each layer on the host waits for the device"
        try:
            found.append(await answers(target))
        finally:
            await target.close()
    assert found[0] == found[1]
