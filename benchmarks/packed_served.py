"""The 8B shape over HTTP, in bf16 and packed: decoding of one stream behind 2,048 tokens, of its bytes' limit.

    python -m benchmarks.packed_served [--formats bf16 fp8 fp8_kept q8_0 q4_k awq] [--layers 36] [--record]

`rekindle serve` runs in a process of its own for each format, without a draft and with one slot. Its model is a folder
whose files have the right headers and no content: a tensor's values are drawn on the device when it is read, in the
layouts of `benchmarks.cuda_packed`. All servers start at the same moment, and one at a time is asked. The time of a
token is that of 129 tokens less that of one, over 128. First tokens are those of prompts of 2,048 and 8,192 tokens, of
which no two begin alike. A token's limit is the bytes that a token must read over the best
bandwidth of a large read or copy: all weights but the embedding, with their scales, and keys and values.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import torch
from attrs import asdict, frozen

from adapters.models.families.qwen3 import FAMILY, Qwen3Config
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DTYPE, bandwidth
from benchmarks.cuda_packed import CONTEXT, LAYERS, laid_out
from benchmarks.family_speeds import DECODED, measure_decode
from benchmarks.first_requests import checkpoint_texts, make_settings
from benchmarks.hybrid import holes, serve_drawn
from benchmarks.peer_servers import ROOT, serve_ours, start_all
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import median, print_table

MODULE = "benchmarks.packed_served"
SHAPE = "8b"
ROUNDS = 3  # of first tokens
DECODE_ROUNDS = 7  # on an H200 the first one takes 2 to 4 % longer than the others, whatever the weights
LENGTHS = (2048, 8192)  # of prompts whose first token is waited for
MARGIN = 256  # rows of a slot that nothing is asked of
BF16 = "bf16"
GOALS = {BF16: 88, "q4_k": 60, "awq": 60, "fp8": 75, "q8_0": 70}  # % of the limit
PROCESSOR_SPEED = 1e10  # bytes a second of a processor, about; its figures say nothing


@frozen
class Served:
    """What was measured of one server. ready, each: in seconds, until it was ready, and of a token in each round.

    token_bytes: that a token must read. first: seconds until the first token of prompts, by their length.
    """

    ready: float
    each: list[float]
    token_bytes: int
    first: Mapping[int, list[float]]

    def compute_share(self, speed: float) -> float:
        """Return the share of the limit that is reached, in %. speed: of memory, bytes a second."""
        return 100 * self.token_bytes / speed / median(self.each)


def measure_server(url: str, ready: float, config: Qwen3Config) -> Served:
    draw = random.Random(1)
    prompt = [draw.randrange(100, 4000) for _ in range(CONTEXT)]
    with httpx.Client(base_url=url, timeout=600) as client:
        each = measure_decode(client, prompt, DECODE_ROUNDS)
        first = {length: [measure_first(client, draw, length) for _ in range(1 + ROUNDS)][1:] for length in LENGTHS}
        placed = client.get("/props").json()["memory"]["models"]["target"]
    embedding = config.vocab_size * config.hidden_size * DTYPE.itemsize
    weights = placed["device"] - (0 if placed["host"] >= embedding else embedding)
    token_bytes = weights + (CONTEXT + DECODED // 2) * config.kv_bytes_per_token(DTYPE)
    return Served(ready, each, token_bytes, first)


def measure_first(client: httpx.Client, draw: random.Random, length: int) -> float:
    """Return the seconds of an answer of one token to a prompt of so many."""
    prompt = [draw.randrange(100, 4000) for _ in range(length)]
    started = time.perf_counter()
    client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0}).raise_for_status()
    return time.perf_counter() - started


def measure_formats(given: argparse.Namespace) -> dict[str, Served]:
    settings = make_settings(SHAPE, given.layers)
    config = FAMILY.parse(settings)
    assert isinstance(config, Qwen3Config)
    with tempfile.TemporaryDirectory() as scratch:
        model = holes(Path(scratch) / "model", settings, config.tensors())
        checkpoint_texts(model, config.vocab_size)
        servers = {
            name: serve_ours(model, ROOT, ("--draft", "none"), sized=True, module=(MODULE, "serve", name))
            for name in given.formats
        }
        found = dict[str, Served]()
        with start_all(servers, 1, max(CONTEXT + DECODED, *LENGTHS) + MARGIN, Path(scratch)) as urls:
            for name, (url, ready) in urls.items():
                found[name] = measure_server(url, ready, config)
                print(name, found[name], flush=True)
    return found


def find_goal(name: str) -> Goal | None:
    return Goal(at_least=GOALS[name]) if name in GOALS else None


def make_figures(found: Mapping[str, Served], layers: int, speed: float) -> list[Figure]:
    subject = name_shape(SHAPE) + (f", {layers} layers" if layers else "")
    what = f"{subject}, decode over HTTP, of the limit of its bytes"
    decode = [
        Figure("packed", what, name, "%", one.compute_share(speed), goal=find_goal(name)) for name, one in found.items()
    ]
    first = [
        Figure("packed", f"{subject}, first of {length:,} tokens over HTTP", name, "ms", 1e3 * median(times))
        for name, one in found.items()
        for length, times in one.first.items()
    ]
    return decode + first


def serve(packing: str, words: Sequence[str]) -> None:
    serve_drawn(lambda config: laid_out(config, packing), words)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3:])
        return
    parser = benchmark_parser(__doc__)
    parser.add_argument("--formats", nargs="+", choices=[BF16, *LAYERS], default=[BF16, "fp8", "q8_0", "q4_k", "awq"])
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    given = parser.parse_args()
    speed = PROCESSOR_SPEED
    if torch.cuda.is_available():
        speed = max(bandwidth().values())
        torch.cuda.empty_cache()
    found = measure_formats(given)
    rows = [
        {
            "weights": name,
            "ms a token": 1e3 * median(one.each),
            "of the limit": one.compute_share(speed) / 100,
            "GB a token": one.token_bytes / 1e9,
            "ready, s": one.ready,
            **{f"first of {length}, ms": 1e3 * median(times) for length, times in one.first.items()},
        }
        for name, one in found.items()
    ]
    print_table(f"{speed / 1e12:.2f} TB/s", rows)
    raw = {"bandwidth": speed} | {name: asdict(one) for name, one in found.items()}
    publish(given, "packed_served", raw, make_figures(found, given.layers, speed))


if __name__ == "__main__":
    main()
