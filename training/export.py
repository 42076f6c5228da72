"""Writes a trained target as a Hugging Face folder: bf16 safetensors in shards with an index, configs, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.drafter_model import ScoringModel
from training.hybrid_model import Hybrid, HybridGeometry
from training.model import UNUSED_IDS, Geometry, Qwen3
from training.tokenizer import settings

SHARD_BYTES = 14 << 20
INDEX = "model.safetensors.index.json"


Trained = Qwen3 | Hybrid


def export(model: Trained, tokenizer: Tokenizer, folder: Path) -> None:
    """Write everything but the model card. Existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    write_json(folder / "config.json", model.geometry.config())
    write_json(folder / "generation_config.json", model.geometry.generation())
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(folder / "tokenizer_config.json", settings(model.geometry.context))
    write_shards(prepare_parameters(model), folder)


def prepare_parameters(model: Trained) -> dict[str, Tensor]:
    """Return the parameters in bf16.

    The embedding of an id that is never used becomes the mean of the other rows. So its logit is the mean logit, which
    is never the largest, and the server need not mask it.
    """
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    table = state["model.embed_tokens.weight"].clone()
    used = torch.ones(len(table), dtype=torch.bool)
    used[list(UNUSED_IDS)] = False
    table[~used] = table[used].mean(0)
    state["model.embed_tokens.weight"] = table
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}


def write_shards(state: dict[str, Tensor], folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in state.items():
        if tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in state.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})


def geometry_of(config: Mapping[str, Any], layers: int) -> Geometry:
    """Return the sizes in a config.json: the target's own, or those that a draft's file repeats."""
    return Geometry(**read_sizes(config), layers=layers)


def hybrid_geometry_of(config: Mapping[str, Any]) -> HybridGeometry:
    return HybridGeometry(
        **read_sizes(config),
        layers=config["num_hidden_layers"],
        interval=config["full_attention_interval"],
        rotary=config["rope_parameters"]["partial_rotary_factor"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        linear_dim=config["linear_key_head_dim"],
        conv=config["linear_conv_kernel_dim"],
    )


def read_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that both kinds of geometry have."""
    return {
        "vocabulary": config["vocab_size"],
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "context": config["max_position_embeddings"],
        "theta": config["rope_parameters"]["rope_theta"],
        "eps": config["rms_norm_eps"],
    }


def load(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Qwen3:
    """Load a dense target that `export` wrote, for evaluation or further training."""
    config = read_config(folder)
    return fill_parameters(Qwen3(geometry_of(config, config["num_hidden_layers"])), folder, device, dtype)


def load_drafter(folder: Path, device: torch.device | str, dtype: torch.dtype) -> ScoringModel:
    """Load a drafter that `export` wrote."""
    config = read_config(folder)
    return fill_parameters(ScoringModel(geometry_of(config, config["num_hidden_layers"])), folder, device, dtype)


def load_hybrid(folder: Path, device: torch.device | str, dtype: torch.dtype) -> Hybrid:
    """Load a hybrid that `export` wrote, its prediction head included."""
    return fill_parameters(Hybrid(hybrid_geometry_of(read_config(folder))), folder, device, dtype)


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


M = TypeVar("M", Qwen3, ScoringModel, Hybrid)


def fill_parameters(model: M, folder: Path, device: torch.device | str, dtype: torch.dtype) -> M:
    """Load the folder's parameters into the model, and return it."""
    files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    state: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        state |= load_file(folder / file)
    model.load_state_dict(state)
    cos, sin = model.cos, model.sin
    model = model.to(device=device, dtype=dtype)
    model.cos, model.sin = cos.to(device), sin.to(device)  # angles stay in float32
    return model


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
