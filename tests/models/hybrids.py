"""Small hybrid models, and what tests do with a shard whose rows are settled step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.families.qwen3_5 import FULL, LINEAR, Qwen35Config
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.delta_interface import DeltaShape
from adapters.models.kernels.step import Segment, Step
from tests.models.checkpoints import EXPERTS, same_bits, same_rows, save_model, tokens_of

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def sizes(attention: tuple[int, int, int], linear: tuple[int, int, int, int], layers: int, **more: object):
    """attention: H, KV, hd. linear: Nk, Nv, dk, dv."""
    heads, kv, head = attention
    key_heads, value_heads, key, value = linear
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key,
        "linear_value_head_dim": value,
        "num_hidden_layers": layers,
        "rope_parameters": ROPE,
        **more,
    }


# The configurations that transformers gets.
HYBRIDS: dict[str, dict[str, object]] = {
    "three of four, key heads shared, tied": sizes((4, 2, 16), (2, 4, 16, 16), 4, tie_word_embeddings=True),
    "every key head its own": sizes((3, 3, 24), (3, 3, 24, 16), 3, layer_types=[LINEAR, FULL, LINEAR]),
    "three value heads to a key head, mqa": sizes(
        (5, 1, 32), (2, 6, 32, 48), 2, layer_types=[LINEAR, FULL], hidden_size=80
    ),
}


SHARED = {**EXPERTS, "shared_expert_intermediate_size": 24}
# The same with experts: the model_type, and the configuration that transformers gets.
SPARSE: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_5_moe": ("qwen3_5_moe_text", {**SHARED, **HYBRIDS["every key head its own"]}),
    "qwen3_next": (
        "qwen3_next",
        {**SHARED, **HYBRIDS["three of four, key heads shared, tied"], "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
}


def save_with_head(folder: Path, family: str = "qwen3_next", **more: object) -> tuple[object, object]:
    """A model with experts and its prediction head in one checkpoint; returns the oracles of both.

    The head's is a model of one layer, whose final norm is the head's.
    """
    own = {**SHARED, **HYBRIDS["three of four, key heads shared, tied"], "vocab_size": 512, **more}
    target = save_model(folder, family, **own)
    with TemporaryDirectory() as temporary:
        head = save_model(Path(temporary), family, seed=1, **own | {"num_hidden_layers": 1, "layer_types": [FULL]})
        found = load_file(Path(temporary) / "model.safetensors")
    tensors, generator = load_file(folder / "model.safetensors"), make_generator(2)
    for name, tensor in found.items():
        if name.startswith(("model.layers.0.", "model.norm.")):
            tensors[name.replace("model.", "mtp.", 1)] = tensor
    hidden = found["model.norm.weight"].shape[0]
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.15
    for part in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{part}.weight"] = torch.randn(hidden, generator=generator) * 0.2
    save_file(tensors, folder / "model.safetensors")
    return target, head


def advance(shard: DenseShard, tokens: Tensor, counts: Sequence[int], *, slot: int = 0, start: int = 0) -> Tensor:
    """Logits of every row; counts: rows of each step, the last one repeated. All of them are settled."""
    found, at, index = [], 0, 0
    while at < len(tokens):
        part = tokens[at : at + counts[min(index, len(counts) - 1)]]
        bucket = next(bucket for bucket in shard.spec.buckets if bucket >= len(part))
        step = Step((Segment(slot, start + at, len(part)),), bucket)
        forward = shard.forward(step, part)
        found.append(shard.logits(step, forward.hidden)[: len(part)].clone())
        shard.commit(step, [len(part)])
        at, index = at + len(part), index + 1
    return torch.cat(found)


# --- the same on any device: a slot's rows, in whatever pieces they come ---

LENGTH = 460
CHUNKS = [(0, 0)]
# A sequence as (bucket, rows) of each step, the last one repeated; 0: the widest bucket, and as many rows.
in_pieces = pytest.mark.parametrize(
    "pieces",
    [
        [(64, 64)],
        [(0, 256), (4, 1)],
        [(128, 100), (4, 4)],
        [(16, 16)],
        [(16, 13), (8, 7)],
        pytest.param([(4, 1)], marks=pytest.mark.long),
        pytest.param([(4, 4)], marks=pytest.mark.long),
        [(0, 256), (4, 1), (4, 2), (16, 9)],
        [(128, 100), (32, 31), (0, 200)],
        [(64, 63), (64, 2), (64, 64), (64, 61)],
        [(0, 130), (128, 65), (4, 3)],
    ],
    ids=str,
)
Whole = tuple[DenseShard, Tensor, Tensor]  # its slot 0 holds these tokens; the last layer's output of each


def config(
    delta: tuple[int, int, int, int],
    *own: object,
    kinds: str = "llf",
    family: type[Qwen35Config] = Qwen35Config,
    **more: object,
) -> Qwen35Config:
    layer_types = tuple(LINEAR if kind == "l" else FULL for kind in kinds)
    return family(*own, linear=DeltaShape(*delta), layer_types=layer_types, **more)


def whole_of(shard: DenseShard) -> Whole:
    tokens = tokens_of(LENGTH, shard.spec.vocab_size)
    return shard, tokens, computed(shard, tokens, CHUNKS)


def computed(
    shard: DenseShard, tokens: Tensor, pieces: Sequence[tuple[int, int]], *, slot: int = 0, start: int = 0
) -> Tensor:
    """The last layer's output for tokens[start:]. Narrow steps are settled by `commit`, wide ones at once."""
    found, at, index = [], start, 0
    while at < len(tokens):
        bucket, count = (one or shard.spec.buckets[-1] for one in pieces[min(index, len(pieces) - 1)])
        part = tokens[at : at + count]
        step = Step((Segment(slot, at, len(part)),), bucket, rows_only=len(part) > 64)
        found.append(last_layer(shard, step, part))
        if not step.rows_only:
            shard.commit(step, [len(part)])
        at, index = at + len(part), index + 1
    return torch.cat(found)


def last_layer(shard: DenseShard, step: Step, tokens: Tensor) -> Tensor:
    return shard.forward(step, tokens).aux_hidden_states[shard.spec.layers.stop - 1][: step.rows].clone()


def same_sequence(shard: DenseShard, ours: int, theirs: int) -> bool:
    first, second = shard.states.export(ours), shard.states.export(theirs)
    same = first.keys() == second.keys() and all(same_bits(first[name], second[name]) for name in first)
    return same and same_rows(shard, ours, theirs, 0, LENGTH)


def check_rows_in_pieces(whole: Whole, pieces: Sequence[tuple[int, int]]) -> None:
    shard, tokens, expected = whole
    assert same_bits(computed(shard, tokens, pieces, slot=1), expected)
    assert same_sequence(shard, 0, 1)


def check_rolled_back_rows(whole: Whole, start: int, kept: int) -> None:
    """Other rows, proposed and refused, crossing multiples of 64 or not: then the sequence as if they had not been."""
    shard, tokens, expected = whole
    computed(shard, tokens[:start], CHUNKS, slot=1)
    wrong = torch.cat((tokens[start : start + kept], tokens_of(31 - kept, shard.spec.vocab_size, seed=start)))
    step = Step((Segment(1, start, 31),), 32)
    for _ in range(3):  # run, and on a GPU recorded and replayed; what is not committed has not happened either
        shard.forward(step, wrong)
    shard.commit(step, [kept])
    assert same_bits(computed(shard, tokens, [(8, 5), (64, 64)], slot=1, start=start + kept), expected[start + kept :])
    assert same_sequence(shard, 0, 1)


def check_slots_side_by_side(whole: Whole) -> None:
    shard, tokens, expected = whole
    starts = (100, 256, 61)
    for slot, start in enumerate(starts, 1):
        computed(shard, tokens[:start], CHUNKS, slot=slot)
    for counts in ((1, 1, 1), (5, 1, 3), (1, 1, 1), (16, 7, 9), (1, 1, 1), (30, 64, 2), (1, 1, 1)):
        spans = [(slot, start, start + count) for slot, start, count in zip((1, 2, 3), starts, counts, strict=True)]
        segments = tuple(Segment(slot, start, stop - start) for slot, start, stop in spans)
        step = Step(segments, next(bucket for bucket in shard.spec.buckets if bucket >= sum(counts)))
        found = last_layer(shard, step, torch.cat([tokens[start:stop] for _, start, stop in spans]))
        assert same_bits(found, torch.cat([expected[start:stop] for _, start, stop in spans]))
        shard.commit(step, counts)
        starts = tuple(stop for _, _, stop in spans)
