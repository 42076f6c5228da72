"""Measures the loss that packed weights and coded rows cost, on code that the demo was not trained on, compared with
unpacked weights and plain rows.

`python -m benchmarks.held_out demo demo:int8 demo@int8 demo@fp8 FILE.gguf FOLDER [--tokens 16384] [--run 1024]
[--device cpu|cuda]`. The first is what the others are compared with; `:int8` and `:int4` are `--quantize`, what follows
`@` is `--kv-dtype`. All read the same tokens, in runs of `--run`, and are computed in what they are served in. `off by`
is how far the log-probability of the token that came is from the first one's, on average, and `at most` for 999 of
1,000.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from adapters import demo
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.factory import build_kernels
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, publish, slug
from benchmarks.subjects import held_out_sources
from benchmarks.tables import print_table

CHUNK = 256


@frozen
class PackedLoss:
    """error: of weights that were rounded at load. losses: nats of each token."""

    name: str
    stored: float
    error: float | None
    losses: torch.Tensor

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    def off(self, other: PackedLoss) -> tuple[float, float]:
        """Return how far the log-probability of a token is off: on average, and for the worst token of a thousand."""
        apart = (self.losses - other.losses).abs()
        return float(apart.mean()), float(apart.quantile(0.999))


def measure_loss(name: str, runs: list[list[int]], length: int, device: torch.device) -> PackedLoss:
    weighed, _, kept = name.partition("@")
    path, _, rounding = weighed.partition(":")
    checkpoint = Checkpoint.open(demo.FOLDERS.get(path, path))
    if rounding:
        checkpoint = checkpoint.with_quantisation(int(rounding.removeprefix("int")))
    dtype = resolve_dtype("auto", checkpoint)
    weights = checkpoint.with_dtype(dtype)
    rows = read_row_types(kept or "auto", dtype)
    placement = ShardPlacement(device=device, dtype=dtype, rows=rows, slots=1, capacity=length, buckets=(CHUNK,))
    shard = checkpoint.family.build(checkpoint.config, weights, build_kernels(device, dtype), placement)
    losses = list[torch.Tensor]()
    for run in runs:
        for start in range(0, length - 1, CHUNK):
            tokens = torch.tensor(run[start : start + CHUNK], device=device)
            step = Step((Segment(0, start, len(tokens)),), CHUNK)
            logits = shard.logits(step, shard.forward(step, tokens).hidden)
            shard.commit(step, [len(tokens)])
            wanted = torch.tensor(run[start + 1 : start + 1 + CHUNK])
            losses.append(cross_entropy(logits[: len(wanted)].double().cpu(), wanted, reduction="none"))
    return PackedLoss(name, weights.stored_bits, weights.rounding_error, torch.cat(losses))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("weights", nargs="+")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--run", type=int, default=1024, help="tokens that are read in a row")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(demo.FOLDER / "tokenizer.json"))
    runs = list[list[int]]()
    for text in held_out_sources()[0].texts:
        ids = tokenizer.encode(text[: 20 * given.run], add_special_tokens=False).ids
        if len(ids) >= given.run:
            runs.append(ids[: given.run])
        if len(runs) * given.run >= given.tokens:
            break
    rows, raw, first = list[dict[str, object]](), list[dict[str, Any]](), None
    for name in given.weights:
        one = measure_loss(name, runs, given.run, torch.device(given.device))
        first = one if first is None else first
        values = {"bits a weight": one.stored, "weights off, %": None if one.error is None else 100 * one.error}
        values |= {"nats a token": one.loss, "more, %": 100 * (one.loss / first.loss - 1)}
        values |= dict(zip(("off by", "at most"), one.off(first), strict=True)) if one is not first else {}
        raw.append({"weights": name, **values})
        rows.append({"weights": name.rsplit("/", 1)[-1], **{key: format_loss(value) for key, value in values.items()}})
    print_table(f"Loss on {len(runs)} held-out files, the first {given.run:,} tokens of each", rows)
    what = f"loss above {slug(Path(given.weights[0]).name)}"
    figures = [Figure("packed", what, Path(row["weights"]).stem, "%", row["more, %"]) for row in raw[1:]]
    publish(given, f"held_out-{slug(Path(given.weights[-1]).name)}", {"rows": raw}, figures, given.device)


def format_loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
