"""Writes a trained draft in the published DFlash format: config.json and one file of flat bf16 tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.draft_model import MASK_ID, DraftGeometry, DraftNetwork
from training.export import geometry_of, write_json

LARGEST = 8_000_000
"""Bytes: what a draft may add to the package."""


def config_of(geometry: DraftGeometry) -> dict[str, Any]:
    """config.json: a Qwen3's, and the fields that DFlash adds. Embedding and head are the target's."""
    target = geometry.target
    return target.config() | {
        "architectures": ["DFlashDraftModel"],
        "block_size": geometry.block,
        "dflash_config": {
            "block_size": geometry.block,
            "mask_token_id": MASK_ID,
            "target_layer_ids": list(geometry.aux_layers),
        },
        "layer_types": ["full_attention"] * geometry.layers,
        "max_window_layers": geometry.layers,
        "num_hidden_layers": geometry.layers,
        "num_target_layers": target.layers,
    }


def export_draft(draft: DraftNetwork, folder: Path) -> None:
    """Write config.json and model.safetensors. Raises ValueError if the weights come to more than LARGEST."""
    state = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in draft.state_dict().items()
    }
    total = sum(tensor.nbytes for tensor in state.values())
    if total > LARGEST:
        raise ValueError(f"the draft has {total} bytes of weights; at most {LARGEST} are shipped")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_of(draft.geometry))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load_draft(folder: Path, device: torch.device | str, dtype: torch.dtype) -> DraftNetwork:
    """A draft that `export_draft` wrote, for evaluation."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = geometry_of(config, config["num_target_layers"])
    aux_layers = tuple(config["dflash_config"]["target_layer_ids"])
    draft = DraftNetwork(DraftGeometry(target, config["num_hidden_layers"], aux_layers, config["block_size"]))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    cos, sin = draft.cos, draft.sin
    draft = draft.to(device=device, dtype=dtype)
    draft.cos, draft.sin = cos.to(device), sin.to(device)  # angles stay in float32
    return draft
