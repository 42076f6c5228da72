"""Layers over any number of shards give the bits of one, whatever is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.checkpoint.safetensors_folder import TensorEntry
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.layer_runner import LayerRunner
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import proven, same_bits, save_qwen3
from tests.models.splits import CONFIGS, CUTS, TOKENS, assert_alike, chunk, pipeline, step, story, story_of, whole_of
from tests.pairs import usual_where


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_any_split_gives_the_bits_of_one_shard(kind: str, cuts: tuple[int, ...]) -> None:
    whole = whole_of(kind)
    split = pipeline(kind, cuts)
    assert story(split) == story_of(kind)
    assert_alike(split, whole)


def test_trees_branch_over_all_shards() -> None:
    one, three = pipeline("dense", CUTS["one"]), pipeline("dense", CUTS["three"])
    tree = Step((Segment(0, 64, 3), Segment(0, 65, 2), Segment(0, 66, 1)), 8)
    found = list[Tensor]()
    for shard in (one, three):
        chunk(shard, 0, 0, 64)
        found.append(shard.logits(tree, shard.forward(tree, TOKENS[:6]).hidden)[:6].clone())
        shard.commit(tree, [(0, 3, 5)])
        found.append(step(shard, (0, 67, 1), kept=[1])[0])
    assert same_bits(found[0], found[2])
    assert same_bits(found[1], found[3])


@usual_where(lambda places: places["broken"] == (places["kind"] + places["start"]) % 3)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("start", [128, 130])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_some_shards_have_settled_is_taken_back_where_a_later_one_fails(
    kind: str, start: int, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that finds no memory has not happened: the slot goes on from where it was."""
    whole = whole_of(kind)
    split = pipeline(kind, CUTS["three"])
    for shard in (whole, split):
        chunk(shard, 0, 0, start)

    own: Callable[..., None] = LayerRunner.run

    def fails(self: LayerRunner, *given: object, **how: object) -> None:
        if self is split.parts[broken]._runner:  # noqa: SLF001
            raise torch.OutOfMemoryError("no memory")
        own(self, *given, **how)

    with monkeypatch.context() as patched:
        patched.setattr(LayerRunner, "run", fails)
        with suppress(torch.OutOfMemoryError):
            chunk(split, 0, start, 300)
            raise AssertionError("it has not failed")
    assert all(same_bits(one, whole.states.export(0)[name]) for name, one in split.states.export(0).items())
    for shard in (whole, split):
        chunk(shard, 0, start, 300)
    ours, theirs = (step(shard, (0, 300, 2), kept=[2])[0] for shard in (split, whole))
    assert same_bits(ours, theirs)


def test_a_shard_reads_the_bytes_of_its_own_tensors_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_qwen3(tmp_path, num_hidden_layers=5)
    checkpoint, read, real = Checkpoint.open(tmp_path), list[tuple[int, int]](), TensorEntry.read

    def watched(entry: TensorEntry, name: str) -> Tensor:
        read.append((entry.start, entry.stop))
        return real(entry, name)

    monkeypatch.setattr(TensorEntry, "read", watched)
    config, entries = checkpoint.config, checkpoint.tensors
    for layers in (range(2), range(2, 3), range(3, 5)):
        read.clear()
        DenseShard(config, checkpoint, ReferenceKernels(), ShardPlacement(layers=layers, capacity=64)).close()
        own = [(entries[name].start, entries[name].stop) for name in config.tensors(layers)]
        assert sorted(read) == sorted(own)
    parts = [{*config.tensors(layers)} for layers in (range(2), range(2, 3), range(3, 5))]
    assert set().union(*parts) == {*config.tensors()}
    assert sum(map(len, parts)) == len(config.tensors()), "nothing is read twice"


def test_what_is_no_pipeline_is_refused() -> None:
    parts = pipeline("dense", CUTS["three"]).parts
    for odd in ((), parts[::-1], (parts[0], parts[2])):
        with pytest.raises(ValueError, match="are no run of layers"):
            Pipeline(odd)
    own = CONFIGS["dense"]
    kernels = proven(own, torch.bfloat16, 512).copy_for_shard()
    few = DenseShard(
        own,
        RandomWeights(own),
        kernels,
        ShardPlacement(dtype=torch.bfloat16, layers=range(4, 5), slots=2, capacity=512),
    )
    with pytest.raises(ValueError, match=r"slots differ among the shards: \[3, 3, 2\]"):
        Pipeline((*parts[:2], few))


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_and_states_of_others_are_refused_by_name(kind: str) -> None:
    split = pipeline(kind, CUTS["two"])
    chunk(split, 0, 0, 64)
    rows = dict(split.rows.export(0, 0, 64))
    name = split.rows.spec.names[-1]
    with pytest.raises(ValueError, match=rf"{name} is missing or not expected"):
        split.rows.import_(1, 0, {one: tensor for one, tensor in rows.items() if one != name})
    with pytest.raises(ValueError, match="another is missing or not expected"):
        split.states.import_(1, {**split.states.export(0), "another": rows[name]}, 64)
    assert not split.rows.is_addressable
    with pytest.raises(ValueError, match="they are in the parts"):
        split.rows.view(0, 0, 64)
