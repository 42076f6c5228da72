"""What packed weights cost: the loss on code that the demo was not trained on, beside that of the weights as they were.

`python -m benchmarks.held_out demo demo:int8 demo:int4 FILE.gguf FOLDER [--tokens 16384]`. The first is what the others
are compared with; `:int8` and `:int4` are `--quantize`. All read the same tokens, in runs of 1,024, and are computed in
what they are served in.
"""

from __future__ import annotations

import argparse

import torch
from attrs import frozen
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from adapters import demo
from adapters.models.checkpoint import Checkpoint, resolve_dtype
from adapters.models.kernels.torch_cpu import CpuKernels
from adapters.models.shard import Segment, Step
from benchmarks.report import machine, raw, table
from benchmarks.subjects import held_out_sources

RUN = 1024
CHUNK = 256


@frozen
class PackedLoss:
    """error: of weights that were rounded at load. loss: nats a token."""

    name: str
    stored: float
    error: float | None
    loss: float


def measured(name: str, runs: list[list[int]]) -> PackedLoss:
    path, _, rounding = name.partition(":")
    checkpoint = Checkpoint.open(demo.FOLDERS.get(path, path))
    if rounding:
        checkpoint = checkpoint.quantised(int(rounding.removeprefix("int")))
    dtype = resolve_dtype("auto", checkpoint)
    weights = checkpoint.rounded(dtype)
    how = {"device": torch.device("cpu"), "dtype": dtype, "slots": 1, "capacity": RUN, "buckets": (CHUNK,)}
    shard = checkpoint.family.build(checkpoint.config, weights, CpuKernels(dtype), **how)
    total = 0.0
    for run in runs:
        for start in range(0, RUN - 1, CHUNK):
            tokens = torch.tensor(run[start : start + CHUNK])
            step = Step((Segment(0, start, len(tokens)),), CHUNK)
            logits = shard.logits(step, shard.forward(step, tokens).hidden)
            shard.commit(step, [len(tokens)])
            wanted = torch.tensor(run[start + 1 : start + 1 + CHUNK])
            total += float(cross_entropy(logits[: len(wanted)].float(), wanted, reduction="sum"))
    return PackedLoss(name, weights.bits, weights.error, total / (len(runs) * (RUN - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="+")
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    runs = list[list[int]]()
    for text in held_out_sources()[0].texts:
        ids = tokenizer.encode(text[:20_000], add_special_tokens=False).ids
        if len(ids) >= RUN:
            runs.append(ids[:RUN])
        if len(runs) * RUN >= given.tokens:
            break
    rows, first = list[dict[str, object]](), None
    for name in given.weights:
        one = measured(name, runs)
        first = one.loss if first is None else first
        figures = {"bits a weight": one.stored, "error, %": None if one.error is None else 100 * one.error}
        figures |= {"nats a token": one.loss, "more, %": 100 * (one.loss / first - 1)}
        raw("held_out", {"weights": name, **figures})
        rows.append({"weights": name.rsplit("/", 1)[-1], **{key: rounded(value) for key, value in figures.items()}})
    print(machine())
    table(f"Loss on {len(runs)} held-out files, the first {RUN:,} tokens of each", rows)


def rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
