"""The demo at widths that K quants fit: the same function, with zeros behind its rows, columns and heads.

    python -m benchmarks.widened FOLDER [--ggml LIBGGML-BASE.SO Q4_K_M Q5_K_M Q6_K IQ4_XS Q8_0 Q4_0] [--fp8]

Blocks of 256 numbers do not fit rows of 320 and 832. Here hidden rows have 512 numbers, inner ones 1,024, and there are
8 heads of queries instead of 5. All new weights are zeros, and so is everything that is computed from them. A norm over
512 columns, 320 of which are not zero, gives the same as one over 320 if its weight and its epsilon are scaled by 320 /
512, the weight by the square root of that. (Norms of heads share that epsilon and keep their width: a change of 4e-7
compared with squares of about one.) Greedy answers of both models in float32 are compared. --ggml uses llama.cpp's own
quantisation, which its `llama-quantize` calls, and mixes of types. Their files are put next to the folder, as
FOLDER-Q4_K_M.gguf. Each tensor has the type that `llama-quantize` gives it in a model whose head is tied to its
embedding. --fp8 writes FOLDER-fp8-dynamic and FOLDER-fp8-static: E4M3 in blocks of 128 x 128, whose config.json asks
for rows in FP8, or does not.
"""

from __future__ import annotations

import ctypes
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import pad

from adapters import demo
from adapters.models.decoder.shard import Shard, ShardPlacement
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from benchmarks.arguments import benchmark_parser
from benchmarks.subjects import held_out_sources
from tests.models.ggufs import Kind, packed, write_gguf
from tests.models.quantised import quantise

HIDDEN, INNER, HEADS = 512, 1024, 8
# Types that cannot be made without the importance of each column. Here all columns are equally important.
WEIGHED = {Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS}
CHUNK, ANSWER = 256, 32


def widened(source: Checkpoint, folder: Path) -> Checkpoint:
    """A folder of the wider model, with the same tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = source.config
    own, heads = source.folder, HEADS * config.head_dim
    part = config.hidden_size / HIDDEN
    raw = json.loads((own / "config.json").read_text())
    raw |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS}
    raw |= {"rms_norm_eps": config.rms_norm_eps * part}
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(own / name, folder / name)
    wide = {config.hidden_size: HIDDEN, config.intermediate_size: INNER}

    def padded(name: str) -> Tensor:
        tensor = source.read(name)
        kind = name.split(".")[-2]
        if kind in {"q_norm", "k_norm"}:
            return tensor
        if tensor.ndim == 1:
            return pad(tensor.float() * math.sqrt(part), (0, HIDDEN - len(tensor)))
        rows, columns = (wide.get(size, size) for size in tensor.shape)
        if kind == "q_proj":
            rows = heads
        if kind == "o_proj":
            columns = heads
        return pad(tensor, (0, columns - tensor.shape[1], 0, rows - tensor.shape[0])).contiguous()

    save_file({name: padded(name) for name in source.tensors}, folder / "model.safetensors")
    return Checkpoint.open(folder)


def kind_in(mix: str, name: str, layers: int) -> Kind:
    """Return the type that `llama-quantize` gives a tensor (`llama_tensor_get_type_impl`)."""
    own = Kind[mix if mix in Kind.__members__ else mix.removesuffix("_M")]
    if not name.startswith("blk."):
        return own if own in {Kind.Q8_0, Kind.BF16} else Kind.Q6_K
    layer, eighth = int(name.split(".")[1]), layers // 8
    values, down = "attn_v" in name, "ffn_down" in name
    if mix not in Kind.__members__ and (values or down):
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return Kind.Q6_K if more else own
    if own is Kind.IQ4_XS and (values or (down and layer < eighth)):
        return Kind.Q5_K
    return own


def quantised(library: str, mix: str, layers: int) -> Callable[[str, np.ndarray, Kind], tuple[np.ndarray, Kind]]:
    code = ctypes.CDLL(library).ggml_quantize_chunk
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    code.argtypes, code.restype = [ctypes.c_int, pointer, pointer, size, size, size, pointer], ctypes.c_size_t

    def one(name: str, data: np.ndarray, _: Kind) -> tuple[np.ndarray, Kind]:
        kind = kind_in(mix, name, layers)
        if data.ndim == 1 or kind is Kind.BF16:
            return packed(name, data, kind)
        (rows, columns), (count, block) = data.shape, gguf.GGML_QUANT_SIZES[kind]
        data, found = data.astype(np.float32), np.empty((rows, columns // count * block), np.uint8)
        importance = np.ones(columns, np.float32)
        weights = importance.ctypes.data if kind in WEIGHED else None
        written = code(int(kind), data.ctypes.data, found.ctypes.data, 0, rows, columns, weights)
        assert written == found.nbytes, (name, kind, written, found.nbytes)
        return found, kind

    return one


def float32_shard(checkpoint: Checkpoint, length: int) -> Shard:
    how: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "slots": 1, "capacity": length}
    kernels = CpuKernels(torch.float32)
    return checkpoint.family.build(
        checkpoint.config, checkpoint.with_dtype(torch.float32), kernels, ShardPlacement(**how, buckets=(4, CHUNK))
    )


def greedy(shard: Shard, prompt: list[int]) -> list[int]:
    """Return the greedy tokens behind a prompt."""
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + ANSWER:
        step = Step((Segment(0, done, len(tokens) - done),), 4 if done else CHUNK)
        logits = shard.logits(step, shard.forward(step, torch.tensor(tokens[done:])).hidden)
        shard.commit(step, [len(tokens) - done])
        done = len(tokens)
        tokens.append(int(logits[step.segments[0].count - 1].argmax()))
    return tokens[len(prompt) :]


def write_fp8(source: Path, scheme: str) -> Path:
    """Write a folder in FP8 next to another one. scheme: of activations."""
    to = source.with_name(f"{source.name}-fp8-{scheme}")
    quantise(source, to, "fp8")
    raw = json.loads((to / "config.json").read_text())
    raw["quantization_config"]["activation_scheme"] = scheme
    (to / "config.json").write_text(json.dumps(raw, indent=2))
    return to


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=8, help="files whose beginnings are gone on from by both")
    parser.add_argument("--ggml", nargs="+", metavar="WORD", help="llama.cpp's libggml-base, and mixes of types")
    parser.add_argument("--fp8", action="store_true", help="write folders in FP8")
    given = parser.parse_args()
    source = Checkpoint.open(demo.FOLDER)
    wider = widened(source, given.folder)
    with torch.inference_mode():
        both = [float32_shard(one, CHUNK + ANSWER) for one in (source, wider)]
        tokenizer = Tokenizer.from_file(str(given.folder / "tokenizer.json"))
        texts = held_out_sources()[0].texts[: given.prompts]
        asked = [tokenizer.encode(text[: 4 * CHUNK], add_special_tokens=False).ids[: CHUNK // 2] for text in texts]
        differing = sum(greedy(both[0], one) != greedy(both[1], one) for one in asked)
    print(f"{differing} of {len(asked)} greedy answers of {ANSWER} tokens differ in float32")
    for mix in given.ggml[1:] if given.ggml else ():
        to = given.folder.with_name(f"{given.folder.name}-{mix}.gguf")
        write_gguf(to, given.folder, pack=quantised(given.ggml[0], mix, wider.config.num_layers), tokenizer="smollm")
        print(to, f"{to.stat().st_size / 1e6:.1f} MB")
    for scheme in ("dynamic", "static") if given.fp8 else ():
        print(write_fp8(given.folder, scheme))


if __name__ == "__main__":
    main()
