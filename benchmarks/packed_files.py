"""Writes GGUF files of a dense model's shape in llama.cpp's packed types, whose blocks are random.

    python -m benchmarks.packed_files FOLDER Q4_K_M Q6_K Q8_0 [--shape 8b] [--layers 36]

FOLDER/8b-Q4_K_M.gguf and the others load in our server and in llama.cpp's (`benchmarks.peer --file`). Each tensor has
the type that `llama-quantize` gives it in a model that has its own head. Numbers within a block are random bits. Their
scales are chosen so that weights have a standard deviation of about 0.02, as those of real models have, so that no
activation leaves the range of half precision. No tensor is quantised, so a file of 9 GB takes seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from adapters.models.families.qwen3 import FAMILY
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint_texts, make_settings
from benchmarks.widened import kind_in
from tests.models.ggufs import add, called, settings, text

ARCHITECTURE = "qwen3"
# The half-precision numbers of a block: at which byte they are, and what they must be for weights of about 0.02.
# A number of Q4_K is scale * 6 bits * 4 bits less minimum * 6 bits, one of Q6_K scale * 8 bits * (6 bits - 32).
SCALES: dict[Kind, dict[int, float]] = {
    Kind.Q4_K: {0: 7e-5, 2: 5.2e-4},
    Kind.Q6_K: {208: 1.5e-5},
    Kind.Q8_0: {0: 2.7e-4},
}


def draw_blocks(kind: Kind, count: int, seed: int) -> np.ndarray:
    """Draw `count` blocks of a type: uint8, one row for each block."""
    generator = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.frombuffer(generator.bytes(count * size), np.uint8).reshape(count, size).copy()
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks


class BlockPools:
    """Random blocks of each type. Tensors of one type share them, so that a file is drawn once and not kept twice."""

    def __init__(self) -> None:
        self.pools = dict[Kind, np.ndarray]()

    def take(self, kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
        """Return the packed rows of a matrix: uint8, [rows, bytes of a row]."""
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = shape
        count = rows * columns // numbers
        pool = self.pools.get(kind)
        if pool is None or len(pool) < count:
            pool = self.pools[kind] = draw_blocks(kind, count, int(kind))
        return pool[:count].reshape(rows, columns // numbers * size)


def choose_kind(mix: str, name: str, layers: int) -> Kind:
    """Return the type of a matrix in a mix such as Q4_K_M. Only a tied embedding has the head's type."""
    return Kind[mix.removesuffix("_M")] if name == "token_embd.weight" else kind_in(mix, name, layers)


def write_file(path: Path, shape: str, mix: str, layers: int = 0) -> Path:
    """Write one file. Raises KeyError where the types of a mix have no scales here."""
    raw = make_settings(shape, layers)
    config: Any = FAMILY.parse(raw)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(raw))
        checkpoint_texts(folder, config.vocab_size)
        fields = {**settings(config, ARCHITECTURE), **text(folder, "smollm")}
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    for key, value in fields.items():
        add(writer, key.replace("ARCH", ARCHITECTURE), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_layers)
    pools = BlockPools()
    for published, size in config.tensors().items():
        name = called(published, names, config.num_layers)
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
        else:
            kind = choose_kind(mix, name, config.num_layers)
            writer.add_tensor(name, pools.take(kind, size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mixes", nargs="+", metavar="MIX", choices=("Q4_K_M", "Q6_K", "Q8_0"))
    parser.add_argument("--shape", choices=[*SHAPES], default="8b")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    return parser.parse_args()


def main() -> None:
    given = parse_options()
    given.folder.mkdir(parents=True, exist_ok=True)
    for mix in given.mixes:
        file = given.folder / f"{given.shape}-{mix}.gguf"
        unfinished = file.with_suffix(".part")
        write_file(unfinished, given.shape, mix, given.layers).rename(file)
        print(file, f"{file.stat().st_size / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
