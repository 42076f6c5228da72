"""Tests of which layers go to which device: by weights and with rounding, which options are refused, and that a split
changes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve

from adapters import demo
from adapters.models.kernels.interfaces.product_list import ProductPlan
from adapters.models.numerics.probe_result import Numerics, join_numerics
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.loading.memory.device_survey import (
    Placement,
    choose_device,
    choose_devices,
    free_memory,
    measure_host_slots,
    plan_placement,
)
from engine.loading.open_store import disk_folder
from engine.settings.options import Options, build_options, flat_values
from engine.settings.paths import find_model_folder
from engine.settings.placement import DeviceLocation, layer_ranges, read_devices, read_listen, read_weights
from engine.settings.user_error import UserError
from states.rates import Rates

pytestmark = pytest.mark.usefixtures("rates_are_given")

CONFIG = Checkpoint.open(demo.FOLDER).config  # ten layers
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "weights", "ends"),
    [
        (64, (0.08, 0.46, 0.46), [5, 35, 64]),
        (64, (1,), [64]),
        (64, (1, 1), [32, 64]),
        (64, (1, 1, 1), [21, 43, 64]),
        (32, (1, 1, 1), [11, 21, 32]),
        (5, (1, 1), [3, 5]),  # half a layer goes to the first
        (5, (1, 1, 1), [2, 3, 5]),
        (5, (1,) * 5, [1, 2, 3, 4, 5]),
        (5, (100, 1, 1), [3, 4, 5]),  # everybody has a layer
        (5, (1, 1, 100), [1, 2, 5]),
        (10, (0.1, 0.1, 0.1), [3, 7, 10]),  # thirds, whatever the weights round to
        (6, (1e308, 1e308), [3, 6]),
        (6, (5e-324, 5e-324, 5e-324), [2, 4, 6]),
    ],
)
def test_layers_are_shared_as_the_weights_say(layers: int, weights: Sequence[float], ends: list[int]) -> None:
    found = layer_ranges(layers, weights)
    assert [one.stop for one in found] == ends
    assert [one.start for one in found] == [0, *ends[:-1]]


@pytest.mark.parametrize("layers", range(1, 9))
def test_every_layer_is_somewhere_and_nobody_goes_without(layers: int) -> None:
    for count in range(1, layers + 1):
        for heavy in range(count):
            found = layer_ranges(layers, [1000 if one == heavy else 1 for one in range(count)])
            assert [layer for one in found for layer in one] == list(range(layers))
            assert all(found)


def test_devices_and_weights_are_lists() -> None:
    assert read_devices("cpu") == (DeviceLocation("cpu", "cpu"),)
    local = ("cpu:0", "cpu"), ("cuda:1", "cuda:1"), ("cuda", "cuda"), ("auto:2", "auto:2")
    assert read_devices("cpu:0, cuda:1,cuda,auto:2") == tuple(DeviceLocation(*one) for one in local)
    launched = ("ipc+cpu:0", "cpu"), ("ipc+cuda:3", "cuda:3"), ("hip:1", "cuda:1"), ("hip", "cuda:0")
    assert read_devices("ipc+cpu:0,ipc+cuda:3,hip:1,hip") == tuple(
        DeviceLocation(*one, is_launched=True) for one in launched
    )
    running = {
        "tcp://127.0.0.1:7461": ("127.0.0.1", 7461),
        "tcp://[::1]:1": ("::1", 1),
        "tcp://a.b:9": ("a.b", 9),
    }
    assert read_devices(",".join(running)) == tuple(DeviceLocation(name, address=one) for name, one in running.items())
    assert read_weights("0.08,.5, 1e2") == (0.08, 0.5, 100.0)
    assert Options().placement.locations == (DeviceLocation("auto", "auto"),)
    assert build_options(device="cuda:1").placement.locations == (DeviceLocation("cuda:1", "cuda:1"),)
    both = build_options(target_devices="cpu:0,cpu:0", target_layer_split="1,3")
    assert (both.placement.locations, both.placement.layer_weights) == (
        (DeviceLocation("cpu:0", "cpu"),) * 2,
        (1.0, 3.0),
    )


def test_a_plan_is_of_layers_and_devices() -> None:
    two = plan_placement(build_options(target_devices="cpu:0,cpu", target_layer_split="1,4").placement, CONFIG)
    assert two == (Placement(range(2), CPU), Placement(range(2, 10), CPU))
    assert plan_placement(build_options(device="cpu").placement, CONFIG) == (Placement(range(10), CPU),)
    assert plan_placement(build_options(target_devices="cpu:0").placement, CONFIG) == (Placement(range(10), CPU),)
    shared = plan_placement(build_options(target_devices="cpu,cpu,cpu,cpu").placement, CONFIG)
    assert [one.layers.stop for one in shared] == [3, 5, 8, 10], "free memory, of which each has a quarter"
    assert free_memory(CPU) > 0


REFUSED = {
    "more shards than layers": (
        {"target_devices": ",".join(["cpu"] * 11)},
        "11 shards for 10 layers; accepted: at most one for each layer",
    ),
    "no such device": ({"target_devices": "cpu:0,cuda:77"}, "--target-devices cuda:77: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_this_model_or_machine_cannot_do_is_refused_in_a_line(case: str) -> None:
    given, said = REFUSED[case]
    with pytest.raises(UserError) as refused:
        plan_placement(build_options(**given).placement, CONFIG)
    assert said in str(refused.value)
    assert str(refused.value).startswith("--target-devices")
    assert "\n" not in str(refused.value)


CONTRADICTIONS = {
    "--device, too": ({"device": "cpu", "target_devices": "cpu,cpu"}, "--device cpu is too much: leave one out"),
    "weights alone": ({"target_layer_split": "1,1"}, "--target-layer-split"),
    "too few weights": (
        {"target_devices": "cpu,cpu,cpu", "target_layer_split": "1,2"},
        "--target-layer-split 1,2: 2 weights for 3 devices; accepted: one weight for each device",
    ),
    "an interpreter without a use": (
        {"target_devices": "cpu,tcp://a:1", "target_shard_ipc_python": Path("python")},
        "--target-shard-ipc-python runs what --target-devices, --draft-device or --prefill-drafter-device have in a",
    ),
    "ROCm without its interpreter": (
        {"target_devices": "cpu,hip:0"},
        "name its interpreter with --target-shard-ipc-python",
    ),
    "too many weights": ({"target_devices": "cpu", "target_layer_split": "1,2"}, "2 weights for 1 devices"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(case: str) -> None:
    given, said = CONTRADICTIONS[case]
    with pytest.raises(UserError, match=r"^--target") as refused:
        build_options(**given)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0", "auto:1", "cuda:1"])
def test_a_gpu_has_its_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on a device names the device's number, so "cuda" without one would not compare equal to it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    number = int(name[-1]) if ":" in name else 0
    assert choose_device(name, "--device") == torch.device("cuda", number)
    for options in (build_options(device=name), build_options(target_devices=name)):
        assert choose_devices(options.placement) == (torch.device("cuda", number),)
    with pytest.raises(UserError, match="there are 2 CUDA devices"):
        choose_device("cuda:2", "--device")


def test_host_memory_is_asked_for_the_layers_that_are_there() -> None:
    gpu = torch.device("cuda", 0)
    whole, dtype = (
        measure_host_slots(CONFIG, None, torch.bfloat16, torch.bfloat16, [Placement(range(10), CPU)]),
        torch.bfloat16,
    )
    split = measure_host_slots(CONFIG, None, dtype, dtype, [Placement(range(4), CPU), Placement(range(4, 10), CPU)])
    mixed = measure_host_slots(CONFIG, None, dtype, dtype, [Placement(range(4), CPU), Placement(range(4, 10), gpu)])
    assert whole == split
    assert mixed.token * 10 == whole.token * 4


# --- numerics: one class a layer ---

ONE = Numerics("buckets", (4, 8, 64, 256), 64, 256, "onednn", 2, "class a", 0.5, 100, 7)
OTHER = evolve(ONE, numerics_class="class b", kernels="triton", threads=0, buckets=(8, 64, 256), checks=5, seconds=1.0)
GRID = evolve(OTHER, mode="grid", buckets=(8, 256), block_size=256, failures=("16: slot 1",))


def test_where_layers_of_one_class_are_computed_is_no_part_of_it() -> None:
    plan = ProductPlan((4,), (1, 1), (), ())
    one = evolve(ONE, plan=plan)
    assert (
        join_numerics([(range(3), one), (range(3, 10), evolve(one, seconds=7.0))])
        == one
        == join_numerics([(range(10), one)])
    )


def test_layers_of_several_classes_are_named_with_theirs() -> None:
    mixed = join_numerics([(range(3), ONE), (range(3, 5), ONE), (range(5, 10), OTHER)])
    assert mixed.numerics_class == "layers 0..4: class a; layers 5..9: class b"
    assert mixed.numerics_class == join_numerics([(range(5), ONE), (range(5, 10), OTHER)]).numerics_class
    assert mixed.numerics_class != join_numerics([(range(4), ONE), (range(4, 10), OTHER)]).numerics_class
    assert (mixed.mode, mixed.buckets, mixed.block_size, mixed.kernels) == (
        "buckets",
        (8, 64, 256),
        64,
        "onednn, triton",
    )
    assert (mixed.checks, mixed.seconds, mixed.threads) == (105, 1.5, 2)
    plan = ProductPlan((4,), (1, 1), (), ())
    near, far = (range(5), evolve(ONE, plan=plan)), (range(5, 10), OTHER)
    assert join_numerics([near, far]).plan is None
    assert join_numerics([(range(5), OTHER), (range(5, 10), near[1])]).plan == plan, (
        "what a draft's products are proven with"
    )


def test_a_grid_anywhere_is_a_grid_for_all() -> None:
    mixed = join_numerics([(range(5), ONE), (range(5, 10), GRID)])
    assert (mixed.mode, mixed.buckets, mixed.block_size) == ("grid", (8, 256), 256)
    assert mixed.failures == ("16: slot 1",)


# --- split and single honour every field ---

# What the model side never reads: the edge and the command line do.
EDGE = {
    *("alias", "any_model", "tool_parser", "reasoning_parser", "host", "allow_host", "allow_origin", "port", "api_key"),
    *("api_key_file", "request_timeout", "max_body", "grace", "trace", "redact", "paranoid", "stabilize", "log_format"),
    "log_level",
}
CHANGED: dict[str, dict[str, Any]] = {
    "demo": {
        "model": "demo",
        "dtype": "float32",
        "max_ctx": 512,
        "numerics": "fast",
        "slots": 2,
        "latency_target": 20,
        "chunk": 128,
        "threads": 1,
        "draft": str(demo.FOLDER / "draft"),
        "draft_device": "cpu",
        "ddtree": True,
        "ddtree_budget": 9,
        "draft_residency": "request-scoped",
        "max_queue": 7,
        "disk_prefix_cache": "auto:5",
        "kv_cache_budget": 64,
        "host_cache_budget": 32,
        "kv_cache_codec": "store",
        "kv_shared_budget": 100,
        "kv_shared_max_age": 2.0,
        "kv_cache_min_tokens": 64,
        "prefill_compression": "always",
        "prefill_drafter": str(demo.FOLDER),
        "prefill_drafter_device": "cpu",
        "prefill_threshold": 7,
        "prefill_keep_ratio": 0.5,
        "prefill_curve": "10:0.5",
        "disk_prefix_cache_compress": True,
        "kv_memory": 8,
    },
    "demo-hybrid": {
        "model": "demo-hybrid",
        "max_ctx": 512,
        "lazy_draft": True,
        "draft": "mtp",
        "kv_cache_cold_max": 128,
        "kv_cache_interval": 128,
        "state_checkpoints": 3,
        "quantize": "int8",
        "kv_dtype": "int8",
    },
}


PLANS = {"single": {"device": "cpu"}, "split": {"target_devices": "cpu:0,cpu,cpu:0", "target_layer_split": "1,1,2"}}


def outcome(target: LoadedModel) -> dict[str, Any]:
    """But for measured times: all that a server and its clients can tell of a target, but where its layers are."""
    assert target.transfer is not None
    shard, store, draft = target.shard, target.transfer.store, target.draft
    assert store.lower_tiers
    assert draft is not None
    ledger = target.build_ledger(0)
    return {
        "settings": evolve(target.settings, rates=Rates()),
        "identity": target.identity,
        "numerics": attrs.evolve(target.numerics, seconds=0.0),
        "model": (target.model_id, target.mode, target.scope, target.details.dtype),
        "shard": (
            shard.spec.slots,
            shard.spec.capacity,
            shard.spec.buckets,
            shard.spec.dtype,
            shard.states.checkpoint_count,
            shard.rows.spec,
        ),
        "store": (
            store.layout,
            store.memory_tier.index.budget,
            store.lower_tiers[0].index.budget,
            store.lower_tiers[0].chooser.codec,
        ),
        "draft": (draft.identity, draft.weights_state, draft.rows.capacity, draft.block),
        "memory": (ledger.models, ledger.slots),
        "compression": target.compression,
        "threads": torch.get_num_threads(),
    }


def watched(options: Options, seen: set[str]) -> Options:
    """Options whose groups write down what of them is read."""

    def watched_group(group: Any) -> Any:
        class Watched(type(group)):  # type: ignore[misc] # whichever group it is
            def __getattribute__(self, name: str) -> Any:
                seen.add(name)
                return super().__getattribute__(name)

        return Watched(**attrs.asdict(group, recurse=False))

    return Options(**{name: watched_group(group) for name, group in attrs.asdict(options, recurse=False).items()})


@pytest.mark.timeout(120)
async def test_split_and_single_honour_every_field_of_the_options(tmp_path: Path) -> None:
    fields, threads = set(flat_values(Options())), torch.get_num_threads()
    read: dict[str, set[str]] = {"single": set(), "split": set()}
    for model, given in CHANGED.items():
        found = {}
        for name, devices in PLANS.items():
            places = {"kv_cache_dir": tmp_path / model / name, "kv_shared_tier": f"file://{tmp_path}/shared"}
            options = watched(build_options(**given, **devices, **places), read[name])
            target = await load_target(options)
            found[name] = outcome(target)
            assert len(target.shard.parts) == (1 if name == "single" else 3)
            assert disk_folder(options.cache) == tmp_path / model / name
            assert find_model_folder(options.model).name in str(target.folder)
            await target.close()
        torch.set_num_threads(threads)
        assert found["split"] == found["single"]
        default = flat_values(Options())
        assert all(value != default[name] for name, value in given.items() if name not in ("model", "draft"))
    changed = {name for given in CHANGED.values() for name in given}
    placed = {"device", "target_devices", "target_layer_split", "target_shard_ipc_python", "shard_secret_file"}
    placed |= {"experts", "cpu_experts"}  # refused on a CPU, and without experts
    assert changed | EDGE | placed | {"kv_cache_dir", "kv_shared_tier"} == fields, (
        "a new option is said to be the edge's, or tried here"
    )
    assert read["single"] & fields == read["split"] & fields == fields - EDGE, "none is read by one of them alone"


@pytest.mark.parametrize("before", ["", "tcp://"])
@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("127.0.0.1:7461", ("127.0.0.1", 7461)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),  # noqa: S104 - it is only read
        ("[::1]:7461", ("::1", 7461)),
        ("gpu-2.lan:65535", ("gpu-2.lan", 65535)),
    ],
)
def test_a_shard_listens_where_it_is_told_to(before: str, said: str, address: tuple[str, int]) -> None:
    assert read_listen(f"{before}{said}") == address


@pytest.mark.parametrize("said", ["", "127.0.0.1", ":7461", "7461", "here:65536", "http://here:1", "::1:7461", "a b:1"])
def test_a_shard_listens_nowhere_else(said: str) -> None:
    with pytest.raises(ValueError, match=r"^Must be HOST:PORT or tcp://HOST:PORT, such as 127\.0\.0\.1:7461"):
        read_listen(said)
