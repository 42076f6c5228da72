"""A Qwen3.5 of the 27B's shape with random bf16 weights on one CUDA device: the server over HTTP, rounds, transformers.

    python -m benchmarks.hybrid [--parts serve,rounds,transformers] [--layers 64] [--contexts 8192 32768] [--record]
    python -m benchmarks.hybrid --parts serve,rounds --weights q4_k --draft --gib 24 --restart

serve: `rekindle serve` in a process of its own, from a folder whose files have the right headers and no content: a
tensor's values are drawn on the device when it is read. Decoding at 2k is the time of 257 tokens less that of one over
256, against the bytes of weights, keys, values and states that a token must read over the best bandwidth of a large
read or copy. Prefill is the time to the first token of a prompt that is nowhere. restart: the longest one once more in
a new process after `kill -9`, from disk. rounds: verifications of a DFlash draft of the target's width, its acceptance
forced, against plain decoding (`benchmarks.speculation_8b`). transformers: one forward over as many tokens, and which
kernels it found. weights: packed as `benchmarks.cuda_packed` has them, but for what packed checkpoints leave alone.
draft: such a draft is served with it. gib: all that the server's process may take of the device; one sequence then,
rows of `--kv-dtype`, states of four positions, and `--chunk` tokens of a prompt at once. Where that is little,
torch has less to leave unused with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from attrs import evolve, frozen

from adapters.checkpoint.packed_matrix import PackedMatrix, StepLayout
from adapters.checkpoint.safetensors_folder import Fetch, Shapes, StoredTensor
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.drafting import Drafting
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.dflash.checkpoint import DraftCheckpoint, list_draft_tensors
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.families.qwen3_5 import FAMILY, Qwen35Config
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import DECIDING, Checkpoint
from benchmarks import speculation_8b as rounds_of
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth, seconds
from benchmarks.cuda_packed import HEAD, HEADS, LAYERS
from benchmarks.first_requests import ask, checkpoint_texts, listening, wait_until_written
from benchmarks.results import Figure, Goal, publish, slug
from benchmarks.speculation_8b import BLOCK, DeviceDraft, Pair
from benchmarks.tables import median, print_table

VOCABULARY, POSITIONS, DECODED = 248320, 40960, 256
MASK = VOCABULARY - 1
CONTEXT = 2048
AUX_LAYERS = (1, 16, 31, 46, 61)
SETTINGS = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}


DRAFT = {
    "model_type": "qwen3",
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": AUX_LAYERS,
    "rope_theta": 1e6,
    "max_position_embeddings": POSITIONS,
}


def settings(layers: int) -> dict[str, Any]:
    return {**SETTINGS, "num_hidden_layers": layers}


def config_of(layers: int) -> Qwen35Config:
    found = FAMILY.parse(settings(layers))
    assert isinstance(found, Qwen35Config)
    return found


def drawn(config: Qwen35Config, packing: str) -> RandomWeights:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return RandomWeights(config, 1, device, DTYPE, layouts=layouts_of(config, packing))


def layouts_of(config: Qwen35Config, packing: str) -> dict[str, StepLayout]:
    """Of the layers' matrices and of the head, as files have them; none of bf16."""
    if packing == "bf16":
        return {}
    inner = (name for name, shape in config.tensors().items() if name.startswith("model.layers.") and len(shape) == 2)
    found = {name: LAYERS[packing] for name in inner if name.split(".")[-2] not in DECIDING}
    return found | ({HEAD: HEADS[packing]} if packing in HEADS else {})


def token_bytes(config: Qwen35Config, context: int, placed: Mapping[str, int], kv_dtype: str) -> int:
    """Return what decoding one token must read: all weights but the embedding, keys, values and states; states once.

    placed: bytes of the weights on the device and on the host. The embedding is on the host where the device has little
    memory, and nothing else of this model is ever there. kv_dtype: of keys and values, as `--kv-dtype` names it.
    """
    delta, embedding = config.linear, VOCABULARY * config.hidden_size * DTYPE.itemsize
    state = 4 * delta.value_heads * delta.key_size * delta.value_size * config.recurrent_layers()
    weights = placed["device"] - (0 if placed["host"] >= embedding else embedding)
    return weights + context * config.kv_bytes_per_token(read_row_types(kv_dtype, DTYPE)) + state


# --- over HTTP ---


@frozen
class DrawnTensor:
    """What stands in a checkpoint's file as a hole."""

    entry: StoredTensor
    layout: StepLayout | None
    weights: RandomWeights

    @property
    def files(self) -> Mapping[Path, int]:
        return self.entry.files

    @property
    def packing_name(self) -> str:
        return "" if self.layout is None else f"drawn {self.layout.steps}"

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def sources(self) -> tuple[()]:
        return ()

    def read(self, name: str, fetch: Fetch | None = None) -> torch.Tensor:
        return self.weights.read(name)

    def read_packed(self, name: str, fetch: Fetch | None = None) -> PackedMatrix:
        return self.weights.read_packed(name)

    def with_dtype(self, dtype: torch.dtype) -> DrawnTensor:
        return self


def holes(path: Path, config: Mapping[str, Any], shapes: Shapes) -> Path:
    """config.json, and tensors that are holes in a file."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    header, at = dict[str, Any](), 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * DTYPE.itemsize
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


def serve_drawn(find_layouts: Callable[[Any], Mapping[str, StepLayout]], words: Sequence[str]) -> None:
    """`rekindle serve`, whose tensors are drawn. find_layouts: of tensors that are packed, for the model's config."""
    from engine.__main__ import main as rekindle  # noqa: PLC0415 - only this process needs it

    opened = Checkpoint.open

    def draw_tensors(*where: Any, **how: Any) -> Checkpoint:
        found = opened(*where, **how)
        layouts = find_layouts(found.config)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weights = RandomWeights(found.config, 1, device, DTYPE, layouts=layouts)
        tensors = {name: DrawnTensor(entry, layouts.get(name), weights) for name, entry in found.tensors.items()}
        return evolve(found, tensors=tensors)

    Checkpoint.open = draw_tensors  # type: ignore[method-assign]
    sys.argv = ["rekindle", "serve", *words]
    rekindle()


def serve(packing: str, gib: float, words: Sequence[str]) -> None:
    """`rekindle serve` of the hybrid, and of its draft where it has one."""
    DraftCheckpoint.read = lambda self, name: DeviceDraft(self.config).read(name)  # type: ignore[method-assign]
    if gib:
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    serve_drawn(lambda config: layouts_of(config, packing), words)


@contextmanager
def server(
    given: argparse.Namespace, words: Sequence[str], home: Path
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str], float]]:
    own = ["serve", given.weights, str(given.gib), "--port", "0"]
    with listening([sys.executable, "-m", "benchmarks.hybrid", *own, *words], home) as found:
        yield found


def decode(
    client: httpx.Client, prompt: Sequence[int], speed: float, config: Qwen35Config, kv_dtype: str
) -> dict[str, Any]:
    """Milliseconds a token, of three answers."""
    ledger = client.get("/props").json()["memory"]

    def took(count: int) -> float:
        body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
        started = time.perf_counter()
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        spent = time.perf_counter() - started
        assert answer["usage"]["completion_tokens"] == count, answer["usage"]
        return spent

    took(8)
    each = [(took(DECODED + 1) - took(1)) / DECODED for _ in range(3)]
    limit = token_bytes(config, CONTEXT + DECODED // 2, ledger["models"]["target"], kv_dtype) / speed
    return {
        "ledger": ledger,
        "ms a token": 1e3 * median(each),
        "limit ms": 1e3 * limit,
        "share": limit / median(each),
        "all": each,
    }


def over_http(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config, draw = config_of(given.layers), random.Random(1)
    speed = max(bandwidth().values())
    torch.cuda.empty_cache()
    home, kv = folder / "home", folder / "kv"
    kv_dtype = given.kv_dtype if given.gib else "auto"
    home.mkdir()
    longest = max(given.contexts) + 1024
    positions = {"max_position_embeddings": max(POSITIONS, longest)}
    model = holes(folder / "model", settings(given.layers) | positions, config.tensors())
    checkpoint_texts(model, VOCABULARY)
    words = ["--model", str(model), "--device", "cuda", "--kv-cache-dir", str(kv), "--kv-cache-budget", "20000"]
    words += (
        ["--kv-dtype", given.kv_dtype, "--state-checkpoints", "4", "--chunk", str(given.chunk)] if given.gib else []
    )
    words += ["--slots", "1" if given.gib else "2", "--max-ctx", str(longest)]
    weights = holes(folder / "draft", DRAFT, list_draft_tensors(draft_of(given.layers))) if given.draft else None
    words += ["--draft", "none" if weights is None else str(weights)]
    prompts = [[draw.randrange(100, 4000) for _ in range(size)] for size in (CONTEXT, *given.contexts)]
    found: dict[str, Any] = {"bandwidth": speed, "prefill": {}}
    with server(given, words, home) as (client, process, ready):
        found |= {"ready s": ready, "decode": decode(client, prompts[0], speed, config, kv_dtype)}
        print(found, flush=True)
        for prompt in prompts[1:]:
            answer, spent = ask(client, prompt)
            found["prefill"][len(prompt)] = {"seconds": spent, "stages_ms": answer["rekindle"]["stages_ms"]}
            print(len(prompt), spent, flush=True)
        if given.restart:
            wait_until_written(client, 0)
            process.kill()
            process.wait(30)
    if given.restart:
        with server(given, words, home) as (client, _, ready):
            again, spent = ask(client, prompts[-1])
            found["restart"] = {"seconds": spent, "ready s": ready, "rekindle": again["rekindle"]}
            found["restart"]["same"] = again["choices"] == answer["choices"]
    return found


# --- in this process ---


def draft_of(layers: int) -> DFlashConfig:
    aux = tuple(layer for layer in AUX_LAYERS if layer < layers)
    return DFlashConfig(5120, 17408, 5, 32, 8, 128, Rotary(128, 1e6), (AttentionMask(),) * 5, aux, BLOCK, MASK)


def pair(layers: int, packing: str, lane: DeviceLane) -> Pair:
    config, drafts = config_of(layers), draft_of(layers)
    how = {"device": DEVICE, "dtype": DTYPE, "slots": 1, "capacity": rounds_of.CAPACITY, "buckets": rounds_of.BUCKETS}
    shard = DenseShard(
        config, drawn(config, packing), TritonKernels(DEVICE), ShardPlacement(aux_layers=drafts.aux_layers, **how)
    )
    draft = DFlashDraft(
        drafts, DeviceDraft(drafts), TritonKernels(DEVICE), Pipeline((shard,)).head, DraftPlacement(**how)
    )
    executor, drafting = (
        DeviceExecutor(ExecutorParts(shard, rounds_of.BUCKETS, lane=lane)),
        Drafting(draft, rounds_of.BUCKETS),
    )
    return Pair(shard, draft, lane, executor, drafting)


def rounds(layers: int, packing: str) -> list[dict[str, Any]]:
    return rounds_of.steps(pair(layers, packing, DeviceLane(DEVICE)))


# --- transformers ---


def theirs(given: argparse.Namespace) -> dict[str, Any]:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig  # noqa: PLC0415 - heavy, and only for this part
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling  # noqa: PLC0415

    names = ("causal_conv1d_fn", "chunk_gated_delta_rule", "FusedRMSNormGated")
    found: dict[str, Any] = {"kernels": {name: getattr(modeling, name, None) is not None for name in names}}
    own = {name: value for name, value in settings(given.layers).items() if name != "model_type"}
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**own, attn_implementation="sdpa")).to(DTYPE)
    model = model.to_empty(device=DEVICE).eval()
    weights = drawn(config_of(given.layers), "bf16")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights.read(name))
    exponents = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
    model.model.rotary_emb.inv_freq = (1.0 / 1e7**exponents).to(DEVICE)
    with torch.inference_mode():
        for context in given.contexts:
            tokens = torch.randint(0, VOCABULARY, (1, context), device=DEVICE)
            times = [seconds(lambda t=tokens: model(t, logits_to_keep=1, use_cache=True)) for _ in range(2)]  # type: ignore[misc]
            found[str(context)] = min(times)
            print(context, times, flush=True)
    return found


def describe_memory(given: argparse.Namespace) -> str:
    """Return how weights and rows are kept, for the subject of figures."""
    if not given.gib:
        return str(given.weights)
    draft = ", draft" if given.draft else ""
    return f"{given.weights.upper()}, {given.kv_dtype} rows{draft}, {given.gib:g} GiB"


def make_figures(found: Mapping[str, Any], given: argparse.Namespace) -> list[Figure]:
    subject, made = f"27B shape, {describe_memory(given)}", list[Figure]()
    served, peers = found.get("serve", {}), found.get("transformers", {})
    if served:
        goal = Goal(at_least=70 if given.weights == "bf16" else 60)
        share = 100 * served["decode"]["share"]
        made.append(
            Figure("hybrid", f"{subject}, decode, of the limit of its bytes", str(CONTEXT), "%", share, goal=goal)
        )
    for length, one in served.get("prefill", {}).items():
        beside = {"transformers": peers[str(length)]} if str(length) in peers else {}
        goal = Goal(at_most=1, against="transformers") if beside else None
        made.append(Figure("hybrid", f"{subject}, first token cold", str(length), "s", one["seconds"], beside, goal))
    if "restart" in served:
        length = str(max(given.contexts))
        cold = {"cold": served["prefill"][max(served["prefill"])]["seconds"]}
        made.append(
            Figure("hybrid", f"{subject}, first token after kill -9", length, "s", served["restart"]["seconds"], cold)
        )
    for row in found.get("rounds", []):
        if row["what"] == "forced acceptance 8":
            what = f"{subject}, speculation, forced acceptance"
            made.append(Figure("hybrid", what, "8", "x", row["x plain"], goal=Goal(at_least=4)))
    return made


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
        return
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", default="serve,rounds,transformers")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--weights", choices=("bf16", *LAYERS), default="bf16")
    parser.add_argument("--draft", action="store_true", help="serve it with a draft")
    parser.add_argument("--gib", type=float, default=0, help="0: all of the device")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt at once where --gib is given")
    parser.add_argument("--kv-dtype", default="int8", help="of keys and values where --gib is given")
    parser.add_argument("--restart", action="store_true", help="start once more and restore the longest prompt")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    given = parser.parse_args()
    found: dict[str, Any] = {"layers": given.layers}
    for part in given.parts.split(","):
        if part == "serve":
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                found[part] = over_http(given, Path(folder))
        elif part == "rounds":
            found[part] = rounds(given.layers, given.weights)
            print_table("Rounds of a draft whose acceptance is forced", found[part])
        else:
            found[part] = theirs(given)
    name = describe_memory(given) if given.gib else given.weights
    publish(given, f"hybrid-{slug(name) if given.gib else name}", found, make_figures(found, given))


if __name__ == "__main__":
    main()
