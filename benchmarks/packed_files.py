"""Writes GGUF files of a model's shape in llama.cpp's packed types, whose blocks are random.

    python -m benchmarks.packed_files FOLDER Q4_K_M Q6_K Q8_0 [--shape 8b|30b-a3b] [--layers 36]

FOLDER/8b-Q4_K_M.gguf and the others load in our server and in llama.cpp's (`benchmarks.peer --file`). Each tensor has
the type that `llama-quantize` gives it in a model that has its own head. Numbers within a block are random bits. Their
scales are chosen so that weights have a standard deviation of about 0.02, as those of real models have, so that no
activation leaves the range of half precision. No tensor is quantised, so a file of 9 GB takes seconds. Routers are
random numbers in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from adapters.models.decoder.family import family_of
from benchmarks.arguments import benchmark_parser
from benchmarks.first_requests import SHAPES, checkpoint_texts, make_settings
from benchmarks.published_shapes import QWEN3_30B_A3B
from benchmarks.widened import kind_in
from tests.models.ggufs import EXPERT, NAMES, ROUTERS, add, called, settings, text

# Shapes with experts, beside the dense ones: what their config.json says.
SPARSE: dict[str, dict[str, Any]] = {
    "30b-a3b": QWEN3_30B_A3B,
    # To try the benchmark itself.
    "small-moe": QWEN3_30B_A3B
    | {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 256},
}
FILE_SHAPES = (*SHAPES, *SPARSE)
ROUTER_SIZE = 0.02  # the standard deviation of a router's weights
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
        """Return the packed rows of a matrix, or of matrices that share a tensor: uint8, the last dimension a row."""
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        *rows, columns = shape
        count = math.prod(shape) // numbers
        pool = self.pools.get(kind)
        if pool is None or len(pool) < count:
            pool = self.pools[kind] = draw_blocks(kind, count, int(kind))
        return pool[:count].reshape(*rows, columns // numbers * size)


def choose_kind(mix: str, name: str, layers: int) -> Kind:
    """Return the type of a matrix in a mix such as Q4_K_M. Only a tied embedding has the head's type."""
    return Kind[mix.removesuffix("_M")] if name == "token_embd.weight" else kind_in(mix, name, layers)


def make_shape_settings(shape: str, layers: int) -> dict[str, Any]:
    """Return the config.json of a shape. layers: other than the shape has."""
    if shape not in SPARSE:
        return make_settings(shape, layers)
    return SPARSE[shape] | ({"num_hidden_layers": layers} if layers else {})


def write_file(path: Path, shape: str, mix: str, layers: int = 0) -> Path:
    """Write one file. Raises KeyError where the types of a mix have no scales here."""
    raw = make_shape_settings(shape, layers)
    family = family_of(raw)
    config: Any = family.parse(raw)
    architecture = NAMES[family.model_type]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(raw))
        checkpoint_texts(folder, config.vocab_size)
        fields = {**settings(config, architecture), **text(folder, "smollm")}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add(writer, key.replace("ARCH", architecture), value)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_layers)
    pools = BlockPools()
    for published, size in config.tensors().items():
        expert = EXPERT.search(published)
        if expert is not None and expert[1] != "0":
            continue  # the experts of a layer share a tensor, in the place of the first one
        whole = size if expert is None else (config.experts.count, *size)
        name = called(published, names, config.num_layers)
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
        elif name.endswith(ROUTERS):
            draw = np.random.default_rng(len(writer.tensors[0]))
            writer.add_tensor(name, ROUTER_SIZE * draw.standard_normal(size, np.float32))
        else:
            kind = choose_kind(mix, name, config.num_layers)
            writer.add_tensor(name, pools.take(kind, whole), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("mixes", nargs="+", metavar="MIX", choices=("Q4_K_M", "Q6_K", "Q8_0"))
    parser.add_argument("--shape", choices=FILE_SHAPES, default="8b")
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
