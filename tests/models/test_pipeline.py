"""Layers over any number of shards give the bits of one, whatever is asked of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.checkpoint.weights import TensorEntry
from adapters.models.checkpoint import Checkpoint
from adapters.models.dense import DenseShard
from adapters.models.dense_config import DenseConfig
from adapters.models.kernels.experts import ExpertsShape
from adapters.models.pipeline import Pipeline
from adapters.models.qwen3 import Qwen3Config
from adapters.models.qwen3_moe import Qwen3MoeConfig
from adapters.models.shard import Segment, Step
from adapters.models.synthetic import RandomWeights
from tests.models.checkpoints import proven, same_bits, save_qwen3, tokens_of
from tests.models.test_hybrid_exact import config as hybrid

CONFIGS: dict[str, DenseConfig] = {
    "dense": Qwen3Config(512, 96, 160, 5, 4, 2, 24, 2048, 1e6, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(
        512, 96, 160, 5, 4, 2, 24, 2048, 1e6, experts=ExpertsShape(7, 2, 48, normed=True), dense_layers=(1,)
    ),
    "hybrid": hybrid((2, 4, 32, 32), 512, 96, 160, 5, 3, 1, 32, 2048, 1e6, rotated=8, kinds="llflf"),
}
CUTS: dict[str, tuple[int, ...]] = {"one": (5,), "two": (3, 5), "three": (1, 4, 5), "one a layer": (1, 2, 3, 4, 5)}
AUX = (0, 2, 4)
TOKENS = tokens_of(400, 512)


def pipeline(kind: str, cuts: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Pipeline:
    own, begin, parts = CONFIGS[kind], 0, list[DenseShard]()
    kernels = proven(own, dtype, 512)
    for end in cuts:
        weights = RandomWeights(own, scale=own.hidden_size**-0.5)
        how = {"slots": 3, "capacity": 512, "aux_layers": AUX, "state_places": 2, "layers": range(begin, end)}
        parts.append(DenseShard(own, weights, kernels.fresh(), dtype=dtype, **how))
        begin = end
    return Pipeline(parts)


@pytest.fixture(scope="module", params=[*CONFIGS])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(kind) -> DenseShard:
    """All layers in one shard, and nothing around it."""
    (part,) = pipeline(kind, (5,)).parts
    return part


def chunk(shard, slot: int, start: int, stop: int) -> None:
    bucket = next(bucket for bucket in shard.buckets if bucket >= stop - start)
    shard.forward(Step((Segment(slot, start, stop - start),), bucket, rows_only=True), TOKENS[start:stop])


def step(shard, *parts: tuple[int, int, int], kept: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits and auxiliary hidden states of (slot, start, count) rows, of which so many are kept."""
    rows = sum(count for _, _, count in parts)
    own = Step(tuple(Segment(*part) for part in parts), next(bucket for bucket in shard.buckets if bucket >= rows))
    left = shard.forward(own, torch.cat([TOKENS[start : start + count] for _, start, count in parts]))
    found = shard.logits(own, left.hidden)[:rows].clone(), [left.aux_hidden_states[one][:rows].clone() for one in AUX]
    shard.commit(own, kept)
    return found


def story(shard) -> str:
    """A digest of all bits that a life of some slots leaves: chunks, decode steps, roll back, copies, a checkpoint."""
    heard = list[Tensor]()

    def told(found: tuple[Tensor, list[Tensor]]) -> None:
        heard.extend((found[0], *found[1]))

    chunk(shard, 0, 0, 256)
    chunk(shard, 0, 256, 300)
    told(step(shard, (0, 300, 1), kept=[1]))
    told(step(shard, (0, 301, 9), kept=[4]))
    told(step(shard, (0, 305, 16), kept=[16]))
    shard.copy_rows(0, 1, 321)
    shard.copy_state(0, 1)
    told(step(shard, (0, 321, 3), (1, 321, 2), kept=[3, 1]))
    if shard.state_specs:
        shard.keep_state(0, 1)
        shard.load_state(1, 2)
    shard.import_rows(2, 0, shard.export_rows(0, 0, 320))
    shard.import_state(2, shard.export_state(0))
    told(step(shard, (2, 320, 5), kept=[5]))
    heard += [one for _, one in sorted({**shard.export_rows(2, 0, 325), **shard.export_state(2)}.items())]
    digest = hashlib.blake2b()
    for one in heard:
        digest.update(one.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_any_split_gives_the_bits_of_one_shard(kind: str, whole: DenseShard, cuts: tuple[int, ...]) -> None:
    split = pipeline(kind, cuts)
    assert story(split) == story(whole)
    assert (split.layers, split.row_spec, split.state_specs) == (whole.layers, whole.row_spec, whole.state_specs)
    assert (split.capacity, split.slots, split.buckets) == (whole.capacity, whole.slots, whole.buckets)
    assert (split.vocab_size, split.dtype, split.device) == (whole.vocab_size, whole.dtype, whole.device)
    assert (split.state_block, split.state_places) == (whole.state_block, whole.state_places)
    assert split.memory()["kv"] == whole.memory()["kv"]


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


@pytest.mark.parametrize("start", [128, 130])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_some_shards_have_settled_is_taken_back_where_a_later_one_fails(
    whole: DenseShard, kind: str, start: int, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that finds no memory has not happened: the slot goes on from where it was."""
    split = pipeline(kind, CUTS["three"])
    for shard in (whole, split):
        chunk(shard, 0, 0, start)

    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(split.parts[broken], "_run_layers", fails)
        with suppress(torch.OutOfMemoryError):
            chunk(split, 0, start, 300)
            raise AssertionError("it has not failed")
    assert all(same_bits(one, whole.export_state(0)[name]) for name, one in split.export_state(0).items())
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
        DenseShard(config, checkpoint, proven(config, torch.float32, 64).fresh(), layers=layers, capacity=64).close()
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
    kernels = proven(own, torch.bfloat16, 512).fresh()
    few = DenseShard(own, RandomWeights(own), kernels, dtype=torch.bfloat16, layers=range(4, 5), slots=2, capacity=512)
    with pytest.raises(ValueError, match=r"slots differ among the shards: \[3, 3, 2\]"):
        Pipeline((*parts[:2], few))


def test_rows_and_states_of_others_are_refused_by_name(kind: str) -> None:
    split = pipeline(kind, CUTS["two"])
    chunk(split, 0, 0, 64)
    rows = dict(split.export_rows(0, 0, 64))
    name = split.row_spec.names[-1]
    with pytest.raises(ValueError, match=rf"{name} is odd"):
        split.import_rows(1, 0, {one: tensor for one, tensor in rows.items() if one != name})
    with pytest.raises(ValueError, match="another is odd"):
        split.import_state(1, {**split.export_state(0), "another": rows[name]})
    assert not split.addressed
    with pytest.raises(ValueError, match="they are in the parts"):
        split.rows(0, 0, 64)
