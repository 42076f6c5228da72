"""One layer of each kind stands for the others where nothing but kernels and buffers is wanted of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters import demo
from adapters.models.decoder.layer_runner import LayerRunner
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cuda.cuda_graphs import GraphCache
from adapters.models.kernels.layer_kinds import describe_kind, run_one_of_each, skipped_layers
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.memory.device_survey import build_kernels
from engine.loading.warm_up import run_all_shapes


@frozen(eq=False)
class PlainLayer:
    weights: tuple[Tensor, ...]
    norm: Tensor | None = None
    width: int = 4


def layer(*sizes: int, dtype: torch.dtype = torch.float32, **others: Any) -> PlainLayer:
    return PlainLayer(tuple(torch.randn(size, 4, dtype=dtype) for size in sizes), **others)


def test_layers_are_of_one_kind_that_differ_in_numbers_alone() -> None:
    assert describe_kind(layer(3, 5)) == describe_kind(layer(3, 5))
    others = (
        layer(3),
        layer(5, 3),
        layer(3, 5, dtype=torch.bfloat16),
        layer(3, 5, width=8),
        layer(3, 5, norm=torch.ones(4)),
        PlainLayer((torch.randn(4, 3).T, torch.randn(5, 4))),
        PlainLayer((torch.randn(14)[2:].view(3, 4), torch.randn(5, 4))),  # at another address within 16 bytes
    )
    kinds = [describe_kind(one) for one in (layer(3, 5), *others)]
    assert len({*kinds}) == len(kinds)


def test_all_but_the_first_of_each_kind_are_left_out_and_only_where_that_is_asked_for() -> None:
    layers, others = [layer(3), layer(3), layer(5), layer(3), layer(5)], [layer(1), layer(2), layer(3)]
    assert skipped_layers(range(7, 12), layers) == ()
    with run_one_of_each():
        assert [skipped_layers(range(7, 12), layers) for _ in range(2)] == [{8, 10, 11}] * 2
        assert skipped_layers(range(3), others) == set()
    assert skipped_layers(range(7, 12), layers) == ()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_gpu_launches_one_of_each_and_then_all(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run, own = list[int](), LayerRunner.run_layer

    def counted(self: LayerRunner, number: int, *args: Any, **how: Any) -> Tensor | None:
        run.append(number)
        return own(self, number, *args, **how)

    monkeypatch.setattr(LayerRunner, "run_layer", counted)
    where, checkpoint = torch.device(device), Checkpoint.open(demo.FOLDER)
    kernels = build_kernels(where, torch.float32)
    monkeypatch.setattr(type(kernels), "fuse_layers", lambda *_: None)  # operation by operation everywhere
    how: dict[str, Any] = {"device": where, "buckets": (4,), "slots": 1, "capacity": 256}
    shard = checkpoint.family.build(checkpoint.config, checkpoint, kernels, ShardPlacement(**how))
    step, tokens, all_ = Step((Segment(0, 0, 1),), 4), torch.zeros(1, dtype=torch.int64), [*shard.spec.layers]
    with torch.inference_mode():
        with run_one_of_each():
            shard.forward(step, tokens)
        assert run == (all_ if device == "cpu" else all_[:1])
        run.clear()
        shard.forward(step, tokens)
    assert run == all_
    shard.close()


def test_nothing_is_recorded_or_replayed_where_layers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, replayed = list[str](), list[str]()

    def record(_: GraphCache, body: Callable[[], str], pool: object) -> tuple[Any, str]:
        recorded.append(body())
        return SimpleNamespace(replay=lambda: replayed.append("graph")), recorded[-1]

    monkeypatch.setattr(GraphCache, "_record", record)
    graphs = GraphCache(SimpleNamespace(type="cuda"))  # type: ignore[arg-type] # no device is asked for
    with run_one_of_each():
        assert [graphs.run("key", lambda: "some") for _ in range(3)] == ["some"] * 3
    assert recorded == replayed == []
    assert graphs.run("key", lambda: "all") == "all"
    with run_one_of_each():
        assert graphs.run("key", lambda: "some") == "some"
    assert graphs.run("key", lambda: "never") == "all"
    assert (recorded, replayed) == (["all"], ["graph"] * 2)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("folder", [demo.FOLDER, demo.FOLDER / "hybrid"])
def test_graphs_that_a_start_records_have_all_layers(
    folder: Path, hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor plays what a GPU would record: steps, names and keys are those of a start."""
    run, own, graphs = list[int](), LayerRunner.run_layer, dict[Any, list[int]]()

    def counted(self: LayerRunner, number: int, *args: Any, **how: Any) -> Tensor | None:
        run.append(number)
        return own(self, number, *args, **how)

    def record(_: GraphCache, body: Callable[[], Any], pool: object) -> tuple[Any, Any]:
        run.clear()
        result = body()
        return SimpleNamespace(replay=lambda: None, layers=[*run]), result

    gpu: Any = SimpleNamespace(type="cuda")
    cache, attending = GraphCache(gpu), set[str]()

    def launch(_: object, name: str, batch: Any, body: Callable[[], Any], *, piece: str = "") -> Any:
        alone = all(segment.count == 1 for segment in batch.segments)
        merges = hopper and batch.bucket <= 4 and alone and name in attending

        def planned() -> Any:
            attending.update({name} - {"logits"})
            return body()

        return cache.run((name, batch.bucket, merges), planned)

    checkpoint, cpu = Checkpoint.open(folder), torch.device("cpu")
    kernels = build_kernels(cpu, torch.float32)
    monkeypatch.setattr(LayerRunner, "run_layer", counted)
    monkeypatch.setattr(GraphCache, "_record", record)
    monkeypatch.setattr(type(kernels), "fuse_layers", lambda *_: None)
    monkeypatch.setattr(type(kernels), "launch", launch)
    how: dict[str, Any] = {"device": cpu, "buckets": (1, 4, 8, 256), "slots": 1, "capacity": 512}
    shard = checkpoint.family.build(checkpoint.config, checkpoint, kernels, ShardPlacement(**how))
    for bucket in shard.spec.buckets:
        shard._at(bucket).logits_of(shard.spec.vocab_size)  # noqa: SLF001 - before it says that it is on a GPU
    monkeypatch.setattr(shard, "spec", evolve(shard.spec, device=gpu, runs_ahead=True))
    monkeypatch.setattr(shard._runner, "spec", shard.spec)  # noqa: SLF001
    target: Any = SimpleNamespace(
        devices=(),
        launches_ahead=True,
        spec=shard.spec,
        states=shard.states,
        forward=shard.forward,
        logits=shard.logits,
        commit=shard.commit,
    )
    with torch.inference_mode():
        run_all_shapes(target, None, 32, 2)
    graphs = {key: graph.layers for key, (graph, _) in cache._graphs.items()}  # noqa: SLF001
    narrow, one_row = ("settled", "single") if shard.states.specs else ("layers", "layers")
    assert {("rows", 256, False), (narrow, 4, hopper), (one_row, 8, False), (one_row, 1, hopper)} <= graphs.keys()
    assert {
        key: layers for key, layers in graphs.items() if key[0] != "logits" and layers != [*shard.spec.layers]
    } == {}
    assert graphs["logits", 4, False] == []
