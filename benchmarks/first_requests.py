"""Measures the first request of a new process after `kill -9`: recomputed, restored, mixed, and as the planner decides.

    python -m benchmarks.first_requests [--runs 3]                        the shipped demo: 2k and 8k tokens
    python -m benchmarks.first_requests --shape small                     random weights, 32k of context, for two cores
    python -m benchmarks.first_requests --shape 8b --record            random weights of an 8B model's shape, on CUDA

One server computes the prompts, keeps them on disk and is killed. Then every figure is the first request of a process
of its own, over HTTP: the page cache forgets the files, the server starts, and one token is asked for. recompute and
restore force the planner's answer. `mix:F` computes the share F of the rows while the rest is loaded. planner decides
by what it measured at this start, and kept by what an earlier start left. The servers are ours but for that one
function (`python -m benchmarks.first_requests serve MODE ...`). Answers must have the same token and log-probabilities:
the exit status is 1 if any has not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from adapters import demo
from benchmarks.arguments import benchmark_parser
from benchmarks.cold import forget, read_raw
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import median, print_table

ROOT = Path(__file__).parents[1]
STAGES = ("LookingUp", "Restoring", "Prefilling", "Speculating")
TOKENS = {"demo": "2048,8160", **dict.fromkeys(("small", "0.6b", "8b", "70b"), "2048,8192,32768")}
# hidden, inner, layers, heads, heads of keys and values, width of a head, vocabulary
SHAPES = {
    "small": (256, 512, 2, 4, 2, 64, 4096),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936),
    "70b": (8192, 28672, 80, 64, 8, 128, 151936),
}
POSITIONS = 40960
FREE = ("planner", "kept")  # modes in which the planner decides
TOGETHER = 6  # layers in one file
WRITERS = 3  # files written at once for each device


def serve(mode: str, words: Sequence[str]) -> None:
    """Run `rekindle serve` with a planner that gives a fixed answer."""
    from engine.__main__ import main as rekindle  # noqa: PLC0415 - only this process needs them
    from states import policy  # noqa: PLC0415
    from states.settings import Settings  # noqa: PLC0415

    def forced(settings: Settings, _: object, start: int, stop: int, *__: object) -> int:
        name, _, share = mode.partition(":")
        part = {"recompute": 1.0, "restore": 0.0}[name] if not share else float(share)
        return start + int((stop - start) * part) // settings.block_size * settings.block_size if part < 1 else stop

    if mode not in FREE:
        policy.choose_load_start = forced
    sys.argv = ["rekindle", "serve", *words]
    rekindle()


@contextmanager
def server(mode: str, words: Sequence[str], home: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[str], float]]:
    """(client, process, seconds until it was ready). home: where it keeps what it measured of the machine."""
    words = [sys.executable, "-m", "benchmarks.first_requests", "serve", mode, "--port", "0", *words]
    with listening(words, home) as found:
        yield found


@contextmanager
def listening(words: Sequence[str], home: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[str], float]]:
    """A command that serves, once it says where."""
    started = time.perf_counter()
    with (home / "server.log").open("a") as log:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(home)},
        )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, (home / "server.log").read_text()[-2000:]
        with httpx.Client(base_url=found[0], timeout=600) as client:
            client.get("/health").raise_for_status()
            yield client, process, time.perf_counter() - started
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def ask(client: httpx.Client, prompt: Sequence[int]) -> tuple[dict[str, Any], float]:
    """One token, and the seconds until it was there."""
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 5}
    started = time.perf_counter()
    answer = client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - started
    return answer.raise_for_status().json(), seconds


def wait_until_written(client: httpx.Client, more_than: int) -> None:
    """Until there are more entries than that, and no more come."""
    entries = -1
    while True:
        cache = client.get("/props").json()["full_cache"]
        if cache["entries"] == entries > more_than and not cache["queued_bytes"]:
            return
        entries = cache["entries"]
        time.sleep(0.3)


def once(mode: str, prompt: Sequence[int], files: Sequence[Path], words: Sequence[str], home: Path) -> dict[str, Any]:
    """The first request of a process."""
    if mode != "kept":
        shutil.rmtree(home / "rekindle" / "rates", ignore_errors=True)
    forget(files)
    with server(mode, words, home) as (client, _, ready):
        before = client.get("/props").json()["rates_ns"]
        forget(files)
        answer, seconds = ask(client, prompt)
    about = answer["rekindle"]
    return {
        "mode": mode,
        "tokens": len(prompt),
        "seconds": seconds,
        "ready_s": ready,
        "restored": about["restored_tokens"],
        "stages_ms": {stage: about["stages_ms"].get(stage, 0.0) for stage in STAGES},
        "rates_ns": before,
        "choices": answer["choices"],
    }


def measure_requests(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    end, home, kv = time.monotonic() + given.limit, folder / "home", folder / "kv"
    home.mkdir()
    started = time.perf_counter()
    words = ["--model", str(checkpoint(folder / "model", given)) if given.shape != "demo" else "demo"]
    print(f"the model is there after {time.perf_counter() - started:.1f} s", flush=True)
    words += ["--device", given.device, "--threads", given.threads, "--kv-cache-dir", str(kv)]
    words += ["--host-cache-budget", "0", "--kv-cache-budget", "40000", "--kv-cache-codec", given.codec]
    draw = random.Random(1)
    prompts = [[draw.randrange(100, 4000) for _ in range(int(size))] for size in given.tokens.split(",")]
    truth, groups = list[Any](), list[list[Path]]()
    with server("planner", words, home) as (client, process, _):
        ask(client, [draw.randrange(100, 4000) for _ in range(100)])  # what is only done once in a process
        for prompt in prompts:
            before = set(kv.glob("*.zst"))
            truth.append(ask(client, prompt)[0]["choices"])
            wait_until_written(client, len(before))
            groups.append(sorted(set(kv.glob("*.zst")) - before))
        codec = client.get("/props").json()["full_cache"]["codec"]
        process.kill()
        process.wait(30)
    print(f"written after {time.perf_counter() - started:.1f} s, codec {codec}", flush=True)
    found, slowest = list[dict[str, Any]](), 0.0
    for _ in range(given.runs):
        for prompt, first, files in zip(prompts, truth, groups, strict=True):
            for mode in given.modes.split(","):
                if time.monotonic() + 1.2 * slowest > end:
                    return summarise_runs(found, given, codec, groups)
                begun = time.monotonic()
                one = once(mode, prompt, files, words, home)
                slowest = max(slowest, time.monotonic() - begun)
                one["same"] = one.pop("choices") == first
                found.append(one)
                shown = {name: one[name] for name in ("mode", "tokens", "seconds", "restored", "ready_s", "same")}
                print(json.dumps(shown), flush=True)
    return summarise_runs(found, given, codec, groups)


def summarise_runs(
    found: Sequence[dict[str, Any]], given: argparse.Namespace, codec: str, groups: Sequence[Sequence[Path]]
) -> dict[str, Any]:
    """Medians, and how the planner does against the better of what was forced."""
    rows = list[dict[str, Any]]()
    for size, files in zip(map(int, given.tokens.split(",")), groups, strict=True):
        forget(files)
        read, seconds = read_raw(files)
        of = {
            mode: [one for one in found if (one["mode"], one["tokens"]) == (mode, size)]
            for mode in given.modes.split(",")
        }
        if not all(of.values()):
            continue  # the time was over
        middle = {mode: median([one["seconds"] for one in some]) for mode, some in of.items()}
        row: dict[str, Any] = {"tokens": size, **{f"{mode}_s": time for mode, time in middle.items()}}
        free = {mode: middle.pop(mode) for mode in FREE if mode in middle}
        for mode, time_ in free.items():
            row[f"{mode}/better"] = time_ / min(middle.values(), default=time_)
            row[f"{mode}_restored"] = median([one["restored"] for one in of[mode]])
        rows.append({**row, "raw_GB/s": read / seconds / 1e9, "MB": read / 1e6})
    return {"medians": rows, "runs": list(found), "codec": codec, "shape": given.shape}


def checkpoint(folder: Path, given: argparse.Namespace, positions: int = POSITIONS) -> Path:
    """A Qwen3 with random weights and the demo's tokenizer, in which every id has a text."""
    hidden, inner, layers, heads, kv_heads, width, vocab = SHAPES[given.shape]
    layers = given.layers or layers
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())] or [torch.device("cpu")]
    index = dict[str, str]()
    folder.mkdir()

    def write_file(number: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Draw the tensors of one file on a device. Norms are near 1, all others near 0."""
        device = devices[number % len(devices)]
        generator = torch.Generator(device).manual_seed(number)
        tensors = dict[str, torch.Tensor]()
        for name, shape in shapes.items():
            drawn = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            tensors[name] = (drawn + (len(shape) == 1)).cpu()
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name)
        index.update(dict.fromkeys(tensors, name))

    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    embeddings = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    files: list[dict[str, tuple[int, ...]]] = [{**embeddings, "model.norm.weight": (hidden,)}]
    for first in range(0, layers, TOGETHER):
        numbers = range(first, min(first + TOGETHER, layers))
        files.append({f"model.layers.{n}.{name}.weight": shape for n in numbers for name, shape in parts.items()})
    with ThreadPoolExecutor(WRITERS * len(devices)) as pool:
        [*pool.map(write_file, range(len(files)), files)]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(make_settings(given.shape, layers, positions)))
    checkpoint_texts(folder, vocab)
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()
    return folder


def make_settings(shape: str, layers: int = 0, positions: int = POSITIONS) -> dict[str, Any]:
    """Return config.json of a Qwen3 of a shape. layers: 0 for as many as the shape has."""
    hidden, inner, own_layers, heads, kv_heads, width, vocab = SHAPES[shape]
    layers = layers or own_layers
    config: dict[str, Any] = json.loads((demo.FOLDER / "config.json").read_text())
    return config | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "max_window_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
    }


def checkpoint_texts(folder: Path, vocab: int) -> None:
    """The demo's tokenizer, in which every id has a text."""
    shutil.copy(demo.FOLDER / "tokenizer_config.json", folder)
    tokenizer = json.loads((demo.FOLDER / "tokenizer.json").read_text())
    texts = tokenizer["model"]["vocab"]
    taken = {*texts.values(), *(one["id"] for one in tokenizer["added_tokens"])}
    texts.update({f"t{number}": number for number in range(vocab) if number not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def make_figures(rows: Sequence[Mapping[str, Any]], shape: str) -> list[Figure]:
    """Compare the planner's choice with the better of the modes that were forced."""
    subject, goal = f"{name_shape(shape)}, first request of a new process", Goal(at_most=1.05, against="best forced")
    return [
        Figure(
            "restart",
            subject,
            str(row["tokens"]),
            "s",
            row["planner_s"],
            {"best forced": row["planner_s"] / row["planner/better"], "computed": row["recompute_s"]},
            goal,
        )
        for row in rows
        if "planner_s" in row and "recompute_s" in row
    ]


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3:])
        return 0
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", default="0")
    parser.add_argument("--tokens", default="")
    parser.add_argument("--modes", default="recompute,restore,planner")
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=225, help="seconds after which nothing new is started")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    given = parser.parse_args()
    given.tokens = given.tokens or TOKENS[given.shape]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure_requests(given, Path(folder))
    print_table("Seconds until the first token of a new process's first request; medians", found["medians"])
    publish(given, f"first_requests-{given.shape}", found, make_figures(found["medians"], given.shape), given.device)
    changed = [f"{one['mode']} at {one['tokens']}" for one in found["runs"] if not one["same"]]
    if changed:
        print(f"other answers than cold: {', '.join(changed)}", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
