"""Checkpoints as GGUF files, by the `gguf` package's writer: what llama.cpp's converter does is done again here.

`python -m tests.models.ggufs FOLDER FILE [F16|Q8_0|...|MIX] [PRE-TOKENIZER]` writes one, of a demo as `smollm`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from adapters.models.decoder.config.rope import Llama3, ScaledRotary, Yarn
from adapters.models.kernels.interfaces.experts_interface import SigmoidExpertsShape
from adapters.models.open_checkpoint import Checkpoint
from tests.models.latent_ggufs import LATENT_NAMES, latent_settings, split_keys_values
from tests.models.windowed_ggufs import (
    WINDOWED_NAMES,
    find_scale_name,
    join_halves,
    make_frequency_factors,
    windowed_settings,
    written_as,
)

NAMES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "mimo": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    "mistral": "mistral3",
    "seed_oss": "seed_oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    **WINDOWED_NAMES,
    **LATENT_NAMES,
}
EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)\.(weight|bias)")
ROUTERS = (
    "exp_probs_b.bias",
    "mlp.gate.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    *("shared_expert_gate.weight", "_exps.bias", "_proj_bias", "router.weight", "router.proj.weight"),
)


def packed(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """Norms and what else has one dimension stay in float32, as the converter has them, and so do routers."""
    if data.ndim == 1 or "conv1d" in name or name.endswith(ROUTERS):
        return data, Kind.F32
    return gguf.quantize(data, kind), kind


def mixed(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """Pack a tensor in a mix such as `Q4_K_M`: embedding and head have more bits, and so have values and `ffn_down` of
    every other layer.

    The package writes no Q4_K and Q6_K, and rows that are no multiple of 256 cannot have them. Q4_0 and Q8_0 take their
    place.
    """
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    more = not layer or (int(layer) % 2 == 0 and any(part in name for part in ("attn_v", "ffn_down")))
    return packed(name, data, Kind.Q8_0 if more else Kind.Q4_0)


def random_blocks(name: str, data: np.ndarray, kind: Kind) -> tuple[np.ndarray, Kind]:
    """The same in a type that the package cannot make: blocks of random steps, scaled to be weights."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    if data.ndim == 1 or "conv1d" in name or data.shape[-1] % count:
        return data, Kind.F32
    blocks = np.random.default_rng(len(name)).integers(0, 256, (data.size // count, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.0003).tobytes(), np.uint8)
    if kind is Kind.MXFP4:
        blocks[:, 0] = 117  # an exponent
    for at in {Kind.Q6_K: (208,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q3_K: (108,), Kind.MXFP4: ()}.get(
        kind, (0,)
    ):
        blocks[:, at : at + 2] = scale
    return blocks.reshape(*data.shape[:-1], -1), kind


def write_gguf(
    path: Path,
    folder: Path,
    kind: Kind = Kind.F32,
    *,
    pack: Callable[[str, np.ndarray, Kind], tuple[np.ndarray, Kind]] = packed,
    tokenizer: str | None = None,
    split: int = 0,
    weights: bool = True,
    older: bool = False,
    spare: bool = False,
    **fields: Any,
) -> Path:
    """The checkpoint in `folder` as one file. tokenizer: what llama.cpp calls its pre-tokenizer; None: none is written.

    split: tensors of one file of several. weights: without them, only the header can be read. older: as the converter
    wrote Qwen3-Next at first. spare: with keys of layers that need none. fields: further ones, and None for those that
    are to be left out; "rope_freqs" is the tensor of Gemma 4.
    """
    checkpoint = Checkpoint.open(folder)
    config: Any = checkpoint.config
    name = NAMES[checkpoint.family.model_type]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=split)
    others = {} if checkpoint.family.model_type == "mimo" else checkpoint.others  # its files have no head
    head = {"ARCH.block_count": config.num_layers + 1, "ARCH.nextn_predict_layers": 1} if others else {}
    for key, value in {
        **settings(config, name),
        **head,
        **(text(folder, tokenizer) if tokenizer else {}),
        **fields,
    }.items():
        if key != "rope_freqs":
            add(writer, key.replace("ARCH", name), value)
    layers = config.num_layers + (1 if others else 0)
    # The package does not have Laguna yet, whose tensors are named as those of dots.llm1.
    known = {called: arch for arch, called in gguf.MODEL_ARCH_NAMES.items()}
    arch = known.get(name, gguf.MODEL_ARCH.DOTS1)
    names = gguf.get_tensor_name_map(arch, layers)
    wanted = checkpoint.tensors if spare else config.tensors()
    for published in (*wanted, *others) if weights else ():
        tensor = stacked(checkpoint, published, config, name)
        if tensor is None:
            continue
        whole = split_keys_values(published, tensor, config)
        whole = whole or {called(written_as(published, name), names, config.num_layers): tensor}
        for there, part in (
            whole.items() if older or "in_proj_qkvz" not in published else apart(published, tensor, config)
        ):
            data, stored = pack(there, np.ascontiguousarray(part.numpy()), kind)
            writer.add_tensor(there, data, raw_dtype=stored)
    if name == "gemma4" and (factors := fields.get("rope_freqs", make_frequency_factors(config))) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    scaling = getattr(config, "rope_scaling", None)
    if isinstance(scaling, Llama3):
        plain = type(config.rotary)(config.head_dim, config.rope_theta).frequencies()[0]
        writer.add_tensor("rope_freqs.weight", (plain / config.rotary.frequencies()[0]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stacked(checkpoint: Checkpoint, name: str, config: Any, architecture: str) -> Tensor | None:
    """Return a tensor as the converter writes it. The experts of a layer are one tensor, in the place of the first
    one's.
    """

    def one(published: str) -> Tensor:
        entry = checkpoint.tensors.get(published) or checkpoint.others[published]
        return converted(published, entry.read(published).float(), config, architecture)

    expert = EXPERT.search(name)
    if expert is None:
        return one(name).squeeze(0) if name.endswith("shared_expert_gate.weight") else one(name)
    if expert[1] != "0":
        return None
    every = torch.stack([one(name.replace(".experts.0.", f".experts.{at}.")) for at in range(config.experts.count)])
    if architecture == "gemma4" and expert[2] != "down_proj":
        return join_halves(every, name, lambda other: stacked(checkpoint, other, config, ""))
    return every


def apart(name: str, tensor: Tensor, config: Any) -> list[tuple[str, Tensor]]:
    """Return Qwen3-Next's projections, column by column as the converter does it, the rows of one key head after those
    of another.
    """
    delta, layer = config.linear, name.split(".")[2]
    values = delta.values // delta.key_heads
    columns = tensor.T.reshape(config.hidden_size, delta.key_heads, -1)
    q, k, v, z = torch.split(columns, [delta.key_size, delta.key_size, values, values], -1)
    mixed = torch.cat([one.reshape(config.hidden_size, -1) for one in (q, k, v)], -1)
    gate = z.reshape(config.hidden_size, -1)
    return [(f"blk.{layer}.attn_qkv.weight", mixed.T), (f"blk.{layer}.attn_gate.weight", gate.T)]


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def settings(config: Any, name: str) -> dict[str, Any]:
    if name in LATENT_NAMES.values():
        return latent_settings(config, name)
    if name in WINDOWED_NAMES.values():
        return windowed_settings(config, name)
    found = {
        "ARCH.block_count": config.num_layers,
        "ARCH.context_length": config.max_positions,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.feed_forward_length": config.intermediate_size,
        "ARCH.attention.head_count": config.num_heads,
        "ARCH.attention.head_count_kv": config.num_kv_heads,
        "ARCH.attention.key_length": config.head_dim,
        "ARCH.attention.value_length": config.head_dim,
        "ARCH.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ARCH.rope.freq_base": float(config.rope_theta),
    }
    if getattr(config, "experts", None) is not None:
        found |= {
            "ARCH.expert_count": config.experts.count,
            "ARCH.expert_used_count": config.experts.chosen,
            "ARCH.expert_feed_forward_length": config.experts.inner,
        }
        if config.experts.shared:
            found["ARCH.expert_shared_feed_forward_length"] = config.experts.shared
        if isinstance(config.experts, SigmoidExpertsShape):
            found |= sigmoid_settings(config, config.experts)
    if isinstance(config.rotary, ScaledRotary):
        found["ARCH.attention.temperature_scale"] = config.rotary.beta
        found["ARCH.rope.scaling.yarn_log_multiplier"] = 1.0
    if name.startswith(("qwen35", "qwen3next")):
        found |= {
            "ARCH.rope.dimension_count": config.rotated,
            **({} if name == "qwen3next" else {"ARCH.rope.dimension_sections": [11, 11, 10, 0]}),
            "ARCH.ssm.conv_kernel": 4,
            "ARCH.ssm.group_count": config.linear.key_heads,
            "ARCH.ssm.state_size": config.linear.key_size,
            "ARCH.ssm.time_step_rank": config.linear.value_heads,
            "ARCH.ssm.inner_size": config.linear.values,
            "ARCH.full_attention_interval": 4,
        }
    match getattr(config, "rope_scaling", None):
        case Yarn() as yarn:
            found |= {
                "ARCH.rope.scaling.type": "yarn",
                "ARCH.rope.scaling.factor": yarn.factor,
                "ARCH.rope.scaling.original_context_length": int(yarn.original),
            }
        case Llama3() | None:
            pass
        case linear:
            found |= {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": linear.factor}
    return found


def sigmoid_settings(config: Any, shape: SigmoidExpertsShape) -> dict[str, Any]:
    return {
        "ARCH.expert_gating_func": 2,
        "ARCH.expert_weights_norm": True,
        "ARCH.expert_weights_scale": shape.factor,
        "ARCH.expert_group_count": shape.groups,
        "ARCH.expert_group_used_count": shape.chosen_groups,
        "ARCH.expert_shared_count": shape.shared // shape.inner,
        "ARCH.leading_dense_block_count": getattr(config, "dense", 0),
        "ARCH.rope.dimension_count": config.rotated,
    }


def called(published: str, names: gguf.TensorNameMap, layers: int) -> str:
    """Return the name that a tensor gets, by the package's own tables. The names of the head are not in the
    architecture's table.
    """
    parts = {
        "fc": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
        "pre_fc_norm_embedding": gguf.MODEL_TENSOR.NEXTN_ENORM,
        "pre_fc_norm_hidden": gguf.MODEL_TENSOR.NEXTN_HNORM,
        "norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
    }
    if published.startswith("mtp.layers.0."):
        published = published.replace("mtp.layers.0", f"model.layers.{layers}")
    elif published.startswith("mtp."):
        return gguf.TENSOR_NAMES[parts[published.split(".")[1]]].format(bid=layers) + ".weight"
    published = published.replace("e_score_correction_bias", "e_score_correction.bias")
    if published.endswith("g_proj.weight"):
        return f"blk.{published.split('.')[2]}.attn_gate.weight"
    published = EXPERT.sub(r".experts.\2.\3", published.replace(".dt_bias", ".dt_proj.bias"))
    if (scale := find_scale_name(published)) is not None:
        return scale
    there = names.get_name(published, try_suffixes=(".weight", ".bias"))
    assert there is not None, published
    return there


def converted(name: str, tensor: Tensor, config: Any, architecture: str) -> Tensor:  # noqa: PLR0911 - a rule a line
    if architecture in {"llama", "mistral3"} and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_heads if "q_proj" in name else config.num_kv_heads
        return tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    if architecture == "gemma3":
        return tensor + 1 if name.endswith("norm.weight") else tensor
    if architecture == "qwen3next" and "linear_attn." in name:
        return -tensor.exp() if name.endswith("A_log") else tensor.squeeze()
    if not architecture.startswith(("qwen35", "qwen3next")):
        return tensor
    delta = config.linear

    def turns(rows: Tensor, size: int) -> Tensor:
        heads = rows.reshape(delta.key_heads, delta.value_heads // delta.key_heads, size, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)

    first = delta.channels - delta.values
    if name.endswith("linear_attn.norm.weight"):
        return tensor
    if name.endswith("norm.weight") or "pre_fc_norm" in name:
        return tensor + 1
    if "in_proj_qkv" in name or "conv1d" in name:
        rows = tensor.squeeze()
        return torch.cat((rows[:first], turns(rows[first:], delta.value_size)))
    if "in_proj_z" in name:
        return turns(tensor, delta.value_size)
    if "linear_attn.out_proj" in name:
        return turns(tensor.T.contiguous(), delta.value_size).T.contiguous()
    if "linear_attn." in name:
        return -turns(tensor, 1).exp() if name.endswith("A_log") else turns(tensor, 1)
    return tensor


def text(folder: Path, pre: str) -> Mapping[str, Any]:
    """tokenizer.json and its settings in metadata, as the converter has them."""
    described = json.loads((folder / "tokenizer.json").read_text())
    own = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary, added = described["model"]["vocab"], {token["content"]: token for token in described["added_tokens"]}
    ids = {id_: content for content, id_ in vocabulary.items()} | {token["id"]: text for text, token in added.items()}
    rows = json.loads((folder / "config.json").read_text()).get("vocab_size", max(ids) + 1)
    tokens = [ids.get(at, f"[PAD{at}]") for at in range(rows)]
    types = [
        5 if at not in ids else 1 if ids[at] not in added else 3 if added[ids[at]]["special"] else 4
        for at in range(rows)
    ]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            one if isinstance(one, str) else " ".join(one) for one in described["model"]["merges"]
        ],
        "tokenizer.ggml.add_bos_token": bool(own.get("add_bos_token")),
        "tokenizer.chat_template": own.get("chat_template"),
    }
    for key, special in {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}.items():
        if own.get(special):
            found[f"tokenizer.ggml.{key}_token_id"] = next(at for at, token in ids.items() if token == own[special])
    sampling = folder / "generation_config.json"
    chosen = json.loads(sampling.read_text()) if sampling.is_file() else {}
    for name, key in {"temperature": "temp", "top_k": "top_k", "top_p": "top_p"}.items():
        found[f"general.sampling.{key}"] = chosen.get(name)
    return found


if __name__ == "__main__":
    source, target, kind, pre = (*sys.argv[1:], *("Q8_0", "smollm")[len(sys.argv) - 3 :])
    how = {"pack": mixed} if kind == "MIX" else {"kind": Kind[kind]}
    write_gguf(Path(target), Path(source), **how, tokenizer=pre)
