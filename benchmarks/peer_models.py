"""What the servers of `benchmarks.peer` load, and which servers are started on it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks.first_requests import checkpoint, checkpoint_texts
from benchmarks.packed_folders import write_folder
from benchmarks.peer_servers import DRAWN_MODULE, ROOT, Contender, serve_llama, serve_ours, serve_vllm
from benchmarks.published_shapes import SHAPES
from benchmarks.results import name_shape
from tests.models.ggufs import packed, write_gguf

DEMO = ROOT / "adapters" / "demo"
HYBRID, HYBRID_LAYERS = "hybrid-27b", 64  # the shape whose weights are drawn, and the layers that it has
# Shapes of `benchmarks.family_speeds`: what vLLM calls each, and what its config.json says besides.
# Newer transformers refuse to say how wide heads are where layers differ, which vLLM asks.
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "allow_global_per_layer_attribute_access": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
    "gemma4-26b-a4b": GEMMA4,
    "gemma4-31b": GEMMA4,
}
# To try the benchmark itself.
FAMILIES |= {"small-gpt-oss": FAMILIES["gpt-oss-20b"], "small-gemma": FAMILIES["gemma4-31b"]}
# The hybrid as vLLM's Qwen3-Next, in which every layer has a plain feed-forward. Experts have only sizes.
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "hidden_act": "silu",
    "attention_bias": False,
}
FAMILY_MODULE = ("benchmarks.family_speeds", "serve")  # its weights are drawn as it starts
DRAWN = (HYBRID, *FAMILIES)
# llama.cpp's backend of CUDA may be there and not be used, unless its device is named.
LLAMA_ON_CUDA = ("-ngl", "99", "--device", "CUDA0")
UNREAD = ("--load-format", "dummy")  # of vLLM: weights of its own, from no file


def name_subject(given: argparse.Namespace) -> str:
    """Return the name of what is served. A file of a shape is named after the mix of types at the end of its name."""
    shape = given.shape if given.shape in FAMILIES else name_shape(given.shape.removeprefix("hybrid-"))
    if given.file is not None:
        _, _, mix = given.file.stem.rpartition("-")
        placed = f", experts of {given.cpu_experts} layers on the CPU" if given.cpu_experts else ""
        return given.file.stem if given.shape == "demo" else f"{shape} in {mix}{placed}"
    shape += " shape" if given.shape in FAMILIES else ""
    shape += f" in {given.packing.upper()}" if given.packing else ""
    return f"{shape}, {given.layers} layers" if given.layers else shape


def bf16(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """Pack a tensor as `packed` does, but faster, because there are many gigabytes of them."""
    if data.ndim == 1:
        return packed(name, data, kind)
    return torch.from_numpy(data).bfloat16().view(torch.uint8).numpy(), Kind.BF16


def write_model(given: argparse.Namespace, folder: Path) -> Path:
    """Return the model of a shape that is served, which is written unless it is there."""
    model = given.file or (DEMO if given.shape == "demo" else folder / f"model{given.packing and '-' + given.packing}")
    if not model.exists() and given.packing:
        write_folder(model, given.shape, given.packing, given.layers)
    elif not model.exists():
        checkpoint(model, argparse.Namespace(shape=given.shape, layers=given.layers))
    return model


def list_placement(cpu_experts: int) -> tuple[str, ...]:
    return ("--cpu-experts", str(cpu_experts)) if cpu_experts else ()


def list_llama_options(cpu_experts: int) -> list[str]:
    """Return where llama.cpp computes. cpu_experts: layers whose experts are computed on the CPU."""
    found = list(LLAMA_ON_CUDA if torch.cuda.is_available() else ())
    if cpu_experts or not found:
        found += ["-t", str(torch.get_num_threads())]
    return [*found, "--n-cpu-moe", str(cpu_experts)] if cpu_experts else found


def make_servers(given: argparse.Namespace, folder: Path) -> dict[str, Contender]:
    """Return the servers by name, ours first. folder: where models are written."""
    if given.shape == HYBRID:
        return make_hybrid_servers(given, folder)
    if given.shape in FAMILIES:
        return make_family_servers(given, folder)
    model = write_model(given, folder)
    sized = given.shape != "demo" and not given.defaults
    flags = (*list_placement(given.cpu_experts), *shlex.split(given.flags))
    # The demo is served without a draft and with it.
    plain = () if given.defaults and model != DEMO else ("--draft", "none")
    found = dict[str, Contender]()
    for name, tree in (("ours", ROOT), ("before", given.before)):
        if tree is not None:
            found[name] = serve_ours(model, tree, (*plain, *flags), sized=sized)
            if model == DEMO:
                found[f"{name}, draft"] = serve_ours(model, tree, flags, sized=sized)
    if given.llama is not None:
        file = given.file or folder / "model.gguf"
        if not file.exists():
            write_gguf(file, model, Kind.BF16, tokenizer="smollm", pack=bf16)
        found["llama.cpp"] = serve_llama(given.llama, file, list_llama_options(given.cpu_experts))
    if given.vllm:
        how = (model, given.vllm, given.vllm_path, given.vllm_flags)
        found["vLLM"] = serve_vllm(*how)
        if given.vllm_exact:
            found["vLLM exact"] = serve_vllm(*how, exact=True)
    return found


def make_hybrid_servers(given: argparse.Namespace, folder: Path) -> dict[str, Contender]:
    """Our server and that of another checkout, each of a hybrid whose weights are drawn when it starts, and vLLM.

    vLLM has weights of its own. Its `qwen3_next.py` raises an error where it finds no layer with experts: a copy of
    vLLM that serves this shape returns there instead.
    """
    from benchmarks.hybrid import VOCABULARY, config_of, holes, settings  # noqa: PLC0415 - it needs Triton

    model, layers = folder / HYBRID, given.layers or HYBRID_LAYERS
    if not model.exists():
        holes(model, settings(layers), config_of(layers).tensors())
        checkpoint_texts(model, VOCABULARY)
    flags = ("--draft", "none", *shlex.split(given.flags))
    trees = {"ours": ROOT} if given.before is None else {"ours": ROOT, "before": given.before}
    found = {
        name: serve_ours(model, tree, flags, sized=not given.defaults, module=DRAWN_MODULE)
        for name, tree in trees.items()
    }
    if given.vllm:
        described = {**settings(layers), **NEXT, "mlp_only_layers": list(range(layers))}
        del described["rope_parameters"]
        found["vLLM"] = serve_drawn_vllm(folder / f"{HYBRID}-config", json.dumps(described), VOCABULARY, given)
    return found


def serve_drawn_vllm(model: Path, config: str, vocabulary: int, given: argparse.Namespace) -> Contender:
    """vLLM with weights of its own. model: its folder, written unless it is there. config: text of its config.json."""
    if not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text(config)
        checkpoint_texts(model, vocabulary)
    flags = shlex.join((*UNREAD, *shlex.split(given.vllm_flags)))
    return serve_vllm(model, given.vllm, given.vllm_path, flags)


def make_family_servers(given: argparse.Namespace, folder: Path) -> dict[str, Contender]:
    """Servers of a family's shape: ours draws its weights when it starts, and vLLM has weights of its own."""
    from benchmarks.hybrid import holes  # noqa: PLC0415 - it needs Triton

    shape = SHAPES[given.shape]
    config, settings = shape.parse(given.layers), shape.make_settings(given.layers)
    ours = folder / given.shape
    if not ours.exists():
        holes(ours, settings, shape.list_published(config))
        checkpoint_texts(ours, config.vocab_size)
    module = (*FAMILY_MODULE, given.shape, str(given.layers), str(folder / "profile"))
    flags = ("--draft", "none", *shlex.split(given.flags))
    found = {"ours": serve_ours(ours, ROOT, flags, sized=not given.defaults, module=module)}
    if given.vllm:
        described = {**settings, **FAMILIES[given.shape]}
        found["vLLM"] = serve_drawn_vllm(
            folder / f"{given.shape}-config", json.dumps(described), config.vocab_size, given
        )
    return found
