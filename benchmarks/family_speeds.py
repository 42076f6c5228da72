"""Published shapes with windows or experts on one CUDA device, random weights: decoding at 2k, first token at 8k.

    python -m benchmarks.family_speeds [--shape gemma4-31b|gemma4-26b-a4b|gpt-oss-20b|30b-a3b] [--layers 12] [--record]

`rekindle serve` runs in a process of its own with default options and without a draft, from a folder whose files have
the right headers and no content: a tensor's values are drawn on the device when it is read. Weights are bfloat16, those
of gpt-oss's experts MXFP4, and those of 30b-a3b-q4_k Q4_K with a head in Q6_K. Decoding is the time of 129 tokens less
that of one over 128. Its limit is the bytes that a token must read over the best bandwidth of a large read or copy: all
weights but those of experts that were not chosen, and keys and values, of layers with a window those of the window.
First token: the median of three prompts that are new. profile: kernels of half a second of decoding, from the server's
process, with the time that each adds to those before it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import bandwidth
from benchmarks.first_requests import ask, checkpoint_texts, listening
from benchmarks.hybrid import holes, serve_drawn
from benchmarks.published_shapes import SHAPES, PublishedShape, count_token_bytes
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import median, print_table

CONTEXT, DECODED, PROMPT, PROMPTS = 2048, 128, 8192, 3
PROFILED_S = 0.5
PAUSE_US = 20.0
KERNELS = 40  # lines of a profile, at most
PROFILE_ROUNDS = 12  # of decoding, at most, until the table of kernels is there


# --- the server ---


def serve(shape: PublishedShape, layers: int, profile: Path, words: Sequence[str]) -> None:
    """Run `rekindle serve`, whose tensors are drawn."""
    threading.Thread(target=profile_when_asked, args=(profile,), daemon=True).start()
    serve_drawn(lambda _: shape.find_layouts(shape.parse(layers)), words)


def profile_when_asked(file: Path) -> None:
    """Wait for an empty file, profile kernels for a moment, and write a table of them there."""
    while not file.exists():
        time.sleep(0.05)
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
    with torch.profiler.profile(activities=[kind]) as found:
        time.sleep(PROFILED_S)
    events = [one for one in found.events() or () if one.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(one.name, one.time_range.start, one.time_range.end) for one in events]
    lines = [f"{sum(stop - start for _, start, stop in spans) / 1e3:.1f} ms of kernels in {PROFILED_S} s"]
    lines += list_kernels(spans)
    beside = file.with_suffix(".part")
    beside.write_text("\n".join(lines))
    beside.replace(file)


def list_kernels(spans: Sequence[tuple[str, float, float]]) -> list[str]:
    """Return a line for each kernel, those that take most of the time first.

    spans: names, starts and ends in microseconds. A kernel may begin before those in front of it have ended, and wait
    for them. So what it adds is the time from the last end before its own to its own. A pause of `PAUSE_US` before it
    begins is the host's, and is not counted.
    """
    found = defaultdict[str, list[tuple[float, float]]](list)
    last = min((start for _, start, _ in spans), default=0.0)
    for name, start, stop in sorted(spans, key=lambda span: span[2]):
        found[name].append((stop - (start if start - last > PAUSE_US else last), stop - start))
        last = stop
    whole = sum(added for each in found.values() for added, _ in each) or 1.0
    lines = []
    for name, each in sorted(found.items(), key=lambda one: -sum(added for added, _ in one[1]))[:KERNELS]:
        added, spent = (sum(times) for times in zip(*each, strict=True))
        means = f"{added / len(each):8.2f} us added, {spent / len(each):8.2f} us"
        lines.append(f"{100 * added / whole:5.1f} %  {len(each):6d} x {means}  {name[:90]}")
    return lines


# --- what is asked ---


def measure_decode(client: httpx.Client, prompt: Sequence[int], rounds: int) -> list[float]:
    """Return the seconds of a token in each round."""

    def answer(count: int) -> float:
        body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
        started = time.perf_counter()
        found = client.post("/v1/completions", json=body).raise_for_status().json()
        spent = time.perf_counter() - started
        assert found["usage"]["completion_tokens"] == count, found["usage"]
        return spent

    answer(8)
    return [(answer(DECODED + 1) - answer(1)) / DECODED for _ in range(rounds)]


def profile_decode(client: httpx.Client, prompt: Sequence[int], file: Path) -> str:
    """Return the table of kernels of a while of decoding."""
    file.touch()
    for _ in range(PROFILE_ROUNDS):
        if found := file.read_text():
            return found
        measure_decode(client, prompt, 1)
    return "no profile"


def measure_shape(name: str, given: argparse.Namespace, speed: float) -> dict[str, Any]:
    shape = SHAPES[name]
    config = shape.parse(given.layers)
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch)
        home = folder / "home"
        home.mkdir()
        model = holes(folder / "model", shape.make_settings(given.layers), shape.list_published(config))
        checkpoint_texts(model, config.vocab_size)
        own = ["serve", name, str(given.layers), str(folder / "profile")]
        words = ["--model", str(model), "--draft", "none", "--port", "0", "--kv-cache-dir", str(folder / "kv")]
        words += ["--device", "cuda"] if torch.cuda.is_available() else ["--device", "cpu", "--max-ctx", "16384"]
        prompts = [[draw.randrange(100, 4000) for _ in range(size)] for size in (CONTEXT, *[PROMPT] * PROMPTS)]
        with listening([sys.executable, "-m", "benchmarks.family_speeds", *own, *words], home) as (client, _, ready):
            print(f"{name}: ready after {ready:.1f} s", flush=True)
            each = measure_decode(client, prompts[0], 3)
            limit = count_token_bytes(shape, config, CONTEXT + DECODED // 2) / speed
            found: dict[str, Any] = {
                "ms a token": 1e3 * median(each),
                "limit, ms": 1e3 * limit,
                "share, %": 100 * limit / median(each),
            }
            print(name, found, flush=True)
            firsts = [ask(client, prompt) for prompt in prompts[1:]]
            found["first token at 8k, s"] = median([spent for _, spent in firsts])
            stages = firsts[-1][0]["rekindle"]["stages_ms"]
            ledger = client.get("/props").json()["memory"]
            found |= {"ready, s": ready, "layers": config.num_layers, "each": each, "memory": ledger}
            found |= {"firsts": [spent for _, spent in firsts], "stages_ms": stages}
            print(name, {key: found[key] for key in ("first token at 8k, s", "firsts", "stages_ms")}, flush=True)
            if given.profile:
                table = profile_decode(client, prompts[0], folder / "profile")
                print(table, flush=True)
                found["profile"] = table.splitlines()
    return found


def make_figures(name: str, found: Mapping[str, Any]) -> list[Figure]:
    shape, count = SHAPES[name], found["layers"]
    subject = f"{name} shape" + ("" if count == shape.settings["num_hidden_layers"] else f", {count} layers")
    share = f"{subject}, decode, of its bytes' limit"
    return [
        Figure("decode", share, str(CONTEXT), "%", found["share, %"], goal=Goal(at_least=shape.goal)),
        Figure("cold", f"{subject}, first token", str(PROMPT), "s", found["first token at 8k, s"]),
    ]


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(SHAPES[sys.argv[2]], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
        return
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="gemma4-31b")
    parser.add_argument("--layers", type=int, default=0, help="other than the shapes have")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", type=Path, help="of the files; they are holes")
    given = parser.parse_args()
    speed = 1e10  # bytes a second of a processor, about; its figures say nothing
    if torch.cuda.is_available():
        speed = max(bandwidth().values())
        torch.cuda.empty_cache()
    found = measure_shape(given.shape, given, speed)
    shown = ("ms a token", "limit, ms", "share, %", "first token at 8k, s", "ready, s")
    print_table(f"{given.shape}, {speed / 1e12:.2f} TB/s", [{key: found[key] for key in shown}])
    publish(given, f"family_speeds-{given.shape}", {"bandwidth": speed, **found}, make_figures(given.shape, found))


if __name__ == "__main__":
    main()
