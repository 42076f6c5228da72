"""Folders with packed weights, made by the formats' descriptions, number by number; what they stand for is known.

Nothing of it is shared with what is tested. `python -m tests.models.quantised FOLDER NEW awq` writes one of `FORMATS`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
Parts = dict[str, Tensor]
GROUP = 32
# Matrices of recurrent layers, and those that choose experts: no format packs these
SMALL = ("in_proj_a", "in_proj_b", "conv1d", "mlp.gate", "block_sparse_moe.gate", "shared_expert_gate")
SMALL += ("router", "router.proj", "_proj_bias")


def in_words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Along the last dimension, so many to 32 bits, the first in the lowest. order: which number is at each place."""
    each = 32 // bits
    rows = np.pad(np.asarray(numbers, np.uint32), ((0, 0), (0, -numbers.shape[1] % each)))
    packed = np.zeros((len(rows), rows.shape[1] // each), np.uint32)
    for index, number in enumerate(order or range(each)):
        packed |= rows[:, number::each] << np.uint32(bits * index)
    return torch.from_numpy(packed.view(np.int32))


def one_of_e4m3(byte: int) -> float:
    """A sign, four bits of exponent of bias 7, three of fraction; the least exponent has no leading one."""
    sign, exponent, fraction = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    assert (exponent, fraction) != (15, 7), "not a number"
    if exponent == 0:
        return sign * fraction / 8 * 2**-6
    return float(sign * (1 + fraction / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([0.0 if byte & 127 == 127 else one_of_e4m3(byte) for byte in range(256)])


@frozen
class OnGrid:
    """A matrix as steps, zero points and scales `[outputs, groups]`; group: of each column."""

    steps: Array
    zeros: Array
    scales: Array
    group: Array

    @property
    def values(self) -> Tensor:
        exact = (self.steps - self.zeros[:, self.group]) * self.scales.astype(np.float64)[:, self.group]
        return torch.from_numpy(exact.astype(np.float32))


def steps_of(weight: Tensor, bits: int, group: Array, *, symmetric: bool = False) -> OnGrid:
    """Rounded to the nearest, each group of columns by its own extremes; scales are float16."""
    data, count, most = weight.double().numpy(), int(group.max()) + 1, (1 << bits) - 1
    scales, zeros = np.zeros((len(data), count), np.float16), np.zeros((len(data), count), np.int64)
    for at in range(count):
        columns = data[:, group == at]
        if symmetric:
            scales[:, at] = np.abs(columns).max(1) / (most // 2)
            zeros[:, at] = (most + 1) // 2
        else:
            low, high = np.minimum(columns.min(1), 0), np.maximum(columns.max(1), 0)
            scales[:, at] = (high - low) / most
            zeros[:, at] = np.clip(np.rint(-low / scales[:, at].astype(np.float64)), 1, most)
    steps = np.clip(np.rint(data / scales.astype(np.float64)[:, group]) + zeros[:, group], 0, most).astype(np.int64)
    return OnGrid(steps, zeros, scales, group)


def in_turn(columns: int, size: int = GROUP) -> Array:
    return np.arange(columns) // size


def shuffled(columns: int) -> Array:
    """Return the order of columns with `desc_act`: the columns of a group are anywhere."""
    return np.random.default_rng(columns).permutation(in_turn(columns))


def scales_of(found: OnGrid) -> Tensor:
    return torch.from_numpy(found.scales.copy())


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    found, order = steps_of(weight, 4, in_turn(weight.shape[1])), (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": in_words(found.steps.T, 4, order), "qzeros": in_words(found.zeros.T, 4, order)}
    return {**parts, "scales": scales_of(found).T.contiguous()}, found.values


def gptq(
    weight: Tensor, *, bits: int = 4, less: int = 1, act: bool = False, symmetric: bool = False
) -> tuple[Parts, Tensor]:
    """less: what is taken off zero points before they are stored."""
    group = shuffled(weight.shape[1]) if act else in_turn(weight.shape[1])
    found = steps_of(weight, bits, group, symmetric=symmetric)
    return {
        "qweight": in_words(found.steps, bits).T.contiguous(),
        "qzeros": in_words(found.zeros.T - less, bits),
        "scales": scales_of(found).T.contiguous(),
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }, found.values


def words(
    weight: Tensor, *, bits: int, group: int = GROUP, symmetric: bool = True, act: bool = False
) -> tuple[Parts, Tensor]:
    order = shuffled(weight.shape[1]) if act else in_turn(weight.shape[1], group or weight.shape[1])
    found = steps_of(weight, bits, order, symmetric=symmetric)
    zeros = {} if symmetric else {"weight_zero_point": in_words(found.zeros.T, bits).T.contiguous()}
    return {
        "weight_packed": in_words(found.steps, bits),
        "weight_scale": scales_of(found),
        "weight_shape": torch.tensor(weight.shape),
        **({"weight_g_idx": torch.from_numpy(order.astype(np.int32))} if act else {}),
        **zeros,
    }, found.values


def blocks(
    weight: Tensor, rows: int, columns: int, name: str = "weight_scale_inv", shape: tuple[int, ...] | None = None
) -> tuple[Parts, Tensor]:
    """E4M3 with a float32 scale for each block. rows, columns: 0 is all. shape: that the scales are stored in."""
    down, across = (np.arange(size) // (part or size) for size, part in zip(weight.shape, (rows, columns), strict=True))
    scales = np.zeros((down[-1] + 1, across[-1] + 1), np.float32)
    for at in np.ndindex(*scales.shape):
        scales[at] = weight[down == at[0]][:, across == at[1]].abs().max().item() / 448 or 1.0
    spread = torch.from_numpy(scales)[down][:, across]
    data = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    exact = E4M3[data.view(torch.uint8).numpy()] * spread.double().numpy()
    stored = torch.from_numpy(scales).reshape(scales.shape if shape is None else shape)
    return {"weight": data, name: stored}, torch.from_numpy(exact.astype(np.float32))


def bytes_of(weight: Tensor) -> tuple[Parts, Tensor]:
    """Integers of 8 bits as they are, a scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    data = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": data, "weight_scale": scale}, data.float() * scale.float()


def ct(kind: str, **weights: Any) -> dict[str, Any]:
    about = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": {**about, **weights}, "input_activations": None, "format": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


Packer = Callable[[Tensor], tuple[Parts, Tensor]]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FLOAT = {"num_bits": 8, "type": "float", "group_size": None}
FORMATS: Mapping[str, tuple[dict[str, Any], Packer]] = {
    "fp8": (FP8, lambda w: blocks(w, 128, 128)),
    "fp8, one scale": ({**FP8, "weight_block_size": None}, lambda w: blocks(w, 0, 0, "weight_scale", ())),
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq, by activation": ({**GPTQ, "desc_act": True}, lambda w: gptq(w, act=True)),
    "gptq, symmetric": ({**GPTQ, "sym": True}, lambda w: gptq(w, symmetric=True)),
    "gptq, second format": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda w: gptq(w, less=0)),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, lambda w: gptq(w, bits=8)),
    "w4a16": (ct("pack-quantized"), lambda w: words(w, bits=4)),
    "w4a16, zero points": (ct("pack-quantized", symmetric=False), lambda w: words(w, bits=4, symmetric=False)),
    "w8a16": (
        ct("pack-quantized", num_bits=8, strategy="channel", group_size=None),
        lambda w: words(w, bits=8, group=0),
    ),
    "w8a16, groups": (ct("pack-quantized", num_bits=8), lambda w: words(w, bits=8)),
    "float, a row": (
        ct("float-quantized", **FLOAT, strategy="channel"),
        lambda w: blocks(w, 1, 0, "weight_scale"),
    ),
    "float, whole": (
        ct("float-quantized", **FLOAT, strategy="tensor"),
        lambda w: blocks(w, 0, 0, "weight_scale", (1,)),
    ),
    "float, blocks": (
        ct("float-quantized", **FLOAT, strategy="block", block_structure=[128, 128]),
        lambda w: blocks(w, 128, 128, "weight_scale"),
    ),
    "naive, a row": (
        ct("naive-quantized", **FLOAT, strategy="channel") | {"quantization_status": "frozen"},
        lambda w: blocks(w, 1, 0, "weight_scale"),
    ),
    "w4a16, by activation": (ct("pack-quantized", actorder="group"), lambda w: words(w, bits=4, act=True)),
    "int, a row": (ct("int-quantized", num_bits=8, strategy="channel", group_size=None), bytes_of),
}


def quantise(source: Path, target: Path, name: str, called: Callable[[str], str] = str) -> dict[str, Tensor]:
    """The folder `source`, packed. What all of its tensors stand for. called: what they are renamed to."""
    config, pack = FORMATS[name]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors, stored, values = dict[str, Tensor](), Parts(), dict[str, Tensor]()
    for file in source.glob("*.safetensors"):
        tensors |= {called(tensor): weight for tensor, weight in load_file(file).items()}
    for tensor, weight in tensors.items():
        module = tensor.removesuffix(".weight")
        fills_words = name != "awq" or len(weight) % 8 == 0  # AWQ packs the outputs, eight to a word
        if not fills_words or weight.ndim != 2 or ".layers." not in tensor or module.endswith(SMALL):
            stored[tensor] = values[tensor] = weight
            continue
        parts, values[tensor] = pack(weight)
        stored |= {f"{module}.{part}": data for part, data in parts.items()}
    save_file(stored, target / "model.safetensors")
    about = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**about, "quantization_config": config}))
    return values


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
