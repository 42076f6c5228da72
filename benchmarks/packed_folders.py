"""Writes folders of a dense model's shape in packings that other servers load as well, whose numbers are random.

    python -m benchmarks.packed_folders FOLDER awq fp8 [--shape 8b] [--layers 36]

FOLDER/8b-awq and FOLDER/8b-fp8 have what published checkpoints have: `awq` is AWQ's `gemm` packing in groups of 128
with zero points, `fp8` is E4M3 in blocks of 128 x 128 as with Qwen3. Embeddings, the head and norms are bfloat16. All
weights have a standard deviation of about 0.02, as those of real models have. Matrices share their random numbers, so
that a folder of 9 GB takes seconds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.families.qwen3 import FAMILY
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint_texts, make_settings

GROUP = 128  # columns that share a scale, and rows and columns of a block
SPREAD = 0.02  # the standard deviation of weights
EVEN_SPREAD = math.sqrt((16**2 - 1) / 12)  # of 0..15, all equally often
MIDDLE_ZEROS = 0x7878_7878  # eight zero points, 7 and 8 in turn, as one int32
LARGEST_E4M3 = 448.0
SIGMAS = 6.0  # the largest E4M3 number stands for so many standard deviations
SEED = 1
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
NAMES |= {torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3"}
QUANTISATION: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
    },
}


@frozen
class Part:
    """A tensor of a file. draw: makes so many of its numbers, which other parts of the same function share."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    draw: Callable[[int], Tensor]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def draw_weights(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(SEED)).mul_(SPREAD).bfloat16()


def draw_words(count: int) -> Tensor:
    """Draw int32 words of eight numbers of 4 bits."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, dtype=torch.int64).int()


def draw_e4m3(count: int) -> Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(SEED))
    return drawn.mul_(LARGEST_E4M3 / SIGMAS).clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def make_ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def make_zero_points(count: int) -> Tensor:
    return torch.full((count,), MIDDLE_ZEROS, dtype=torch.int32)


def make_awq_scales(count: int) -> Tensor:
    return torch.full((count,), SPREAD / EVEN_SPREAD, dtype=torch.float16)


def make_block_scales(count: int) -> Tensor:
    return torch.full((count,), SPREAD * SIGMAS / LARGEST_E4M3, dtype=torch.float32)


def list_awq(module: str, rows: int, columns: int) -> Iterator[Part]:
    yield Part(f"{module}.qweight", (columns, rows // 8), torch.int32, draw_words)
    yield Part(f"{module}.qzeros", (columns // GROUP, rows // 8), torch.int32, make_zero_points)
    yield Part(f"{module}.scales", (columns // GROUP, rows), torch.float16, make_awq_scales)


def list_fp8(module: str, rows: int, columns: int) -> Iterator[Part]:
    blocks = (-(-rows // GROUP), -(-columns // GROUP))
    yield Part(f"{module}.weight", (rows, columns), torch.float8_e4m3fn, draw_e4m3)
    yield Part(f"{module}.weight_scale_inv", blocks, torch.float32, make_block_scales)


Lister: TypeAlias = Callable[[str, int, int], Iterator[Part]]
LISTERS: dict[str, Lister] = {"awq": list_awq, "fp8": list_fp8}


def list_parts(tensors: dict[str, tuple[int, ...]], packing: str) -> Iterator[Part]:
    """List what a file holds. tensors: shapes by published name."""
    for name, shape in tensors.items():
        if len(shape) == 1:
            yield Part(name, shape, torch.bfloat16, make_ones)
        elif ".layers." in name:
            yield from LISTERS[packing](name.removesuffix(".weight"), *shape)
        else:
            yield Part(name, shape, torch.bfloat16, draw_weights)


def write_tensors(file: Path, parts: list[Part]) -> None:
    """Write a file of safetensors."""
    header, at = dict[str, Any](), 0
    for part in parts:
        size = part.count * part.dtype.itemsize
        header[part.name] = {"dtype": NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    most = dict[Callable[[int], Tensor], int]()
    for part in parts:
        most[part.draw] = max(most.get(part.draw, 0), part.count)
    pools = {draw: draw(count) for draw, count in most.items()}
    with file.open("wb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            written.write(pools[part.draw][: part.count].view(torch.uint8).numpy().data)


def write_folder(folder: Path, shape: str, packing: str, layers: int = 0) -> Path:
    """Write one folder. layers: 0 for as many as the shape has."""
    raw = {**make_settings(shape, layers), "quantization_config": QUANTISATION[packing]}
    config: Any = FAMILY.parse(raw)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint_texts(folder, config.vocab_size)
    write_tensors(folder / "model.safetensors", list(list_parts(config.tensors(), packing)))
    return folder


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("packings", nargs="+", metavar="PACKING", choices=[*LISTERS])
    parser.add_argument("--shape", choices=[*SHAPES], default="8b")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    return parser.parse_args()


def main() -> None:
    given = parse_options()
    for packing in given.packings:
        made = write_folder(given.folder / f"{given.shape}-{packing}", given.shape, packing, given.layers)
        print(made, f"{(made / 'model.safetensors').stat().st_size / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
