"""Random DFlash drafts and their folders, and a slow forward written straight from the formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.models.decoder.config.dense_config import HEAD_ROWS
from adapters.models.decoder.config.rope import Rotary, Yarn
from adapters.models.decoder.shard import BUCKETS, TargetHead
from adapters.models.drafts.dflash.checkpoint import list_draft_tensors
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.dflash.parts import PLAIN_LOGITS, DraftParts
from adapters.models.drafts.dflash.weights import list_draft_products as draft_products
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.step import Segment, Step
from tests.models.checkpoints import kernels_for, save_model

FULL, CAUSAL = AttentionMask(), AttentionMask(causal=True)
TARGET = Qwen3Config(211, 64, 104, 9, 4, 2, 16, 4096, 1e4)


def slides(window: int, *, causal: bool = True) -> AttentionMask:
    return AttentionMask(causal=causal, window=window)


def config_of(**changes: object) -> DFlashConfig:
    plain = DFlashConfig(64, 104, 3, 4, 2, 16, Rotary(16, 1e4), (FULL,) * 3, (1, 4, 6), 16, 210)
    config = evolve(plain, **changes)
    return evolve(config, rotary=evolve(config.rotary, head_dim=config.head_dim))


GEOMETRIES = {
    "gqa 2 to 1, full": config_of(),
    "one auxiliary layer, mqa, one layer, causal": config_of(
        num_layers=1, num_heads=5, num_kv_heads=1, masks=(CAUSAL,), aux_layers=(4,), intermediate_size=72
    ),
    "sliding and full": config_of(masks=(slides(40), slides(40), FULL), num_heads=8, head_dim=24, block=10),
    "sliding both ways": config_of(masks=(slides(33, causal=False), FULL, slides(700)), num_kv_heads=4, head_dim=32),
    "yarn": config_of(
        num_layers=2,
        masks=(FULL, slides(600)),
        aux_layers=(0, 8),
        rotary=Rotary(16, 1e4, Yarn(4.0, 256.0, 32.0, 1.0, 0.1 * math.log(4) + 1, truncate=True)),
        block=8,
        rms_norm_eps=1e-5,
    ),
}


class Tensors(dict[str, Tensor]):
    """Weights by their published names, as a draft reads them."""

    def read(self, name: str) -> Tensor:
        return self[name]

    def has_tensor(self, name: str) -> bool:
        return name in self

    def digest(self) -> str:
        return "for tests"


def random_tensors(config: DFlashConfig, seed: int = 0) -> Tensors:
    generator = make_generator(seed)
    made = Tensors()
    for name, shape in list_draft_tensors(config).items():
        tensor = torch.randn(shape, generator=generator)
        made[name] = tensor * 0.2 + 1 if len(shape) == 1 else tensor * 1.5 * shape[1] ** -0.5
    return made


def save_draft(folder: Path, config: DFlashConfig, tensors: dict[str, Tensor], **changes: object) -> None:
    """A folder as drafts are published; a change to "absent" leaves the field out."""
    raw: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rotary.theta,
        "vocab_size": TARGET.vocab_size,
        "num_target_layers": TARGET.num_layers,
        "max_position_embeddings": 4096,
        "block_size": config.rows,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.aux_layers)},
        "layer_types": ["sliding_attention" if mask.window else "full_attention" for mask in config.masks],
        **part_fields(config.parts),
        **changes,
    }
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in raw.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(dict(tensors), folder / "model.safetensors")


def part_fields(parts: DraftParts) -> dict[str, object]:
    """The fields of config.json that DFlash 2 and DSpark have, flat as DSpark has them."""
    found: dict[str, object] = {}
    if parts.convolution is not None and parts.selector is not None:
        found |= {"conv_kernel_size": parts.convolution.taps, "conv_group_size": parts.convolution.group}
        found |= {"selector_rank": parts.selector.rank, "selector_top_k": parts.selector.candidates}
        found["architectures"] = ["DFlash2DraftModel"]
    if parts.markov is not None:
        found |= {"markov_rank": parts.markov.rank, "markov_head_type": parts.markov.kind}
        found |= {"enable_confidence_head": parts.markov.has_confidence, "architectures": ["DSparkDraftModel"]}
        found |= {"confidence_head_with_markov": parts.markov.confidence_sees_token}
        found["sample_from_anchor"] = parts.from_anchor
    if parts.embedding_scale != 1:
        found["input_embedding_scale"] = parts.embedding_scale
    if parts.scale != PLAIN_LOGITS:
        found |= {"output_multiplier": parts.scale.multiplier, "final_logit_softcapping": parts.scale.cap}
    return found


def head_of(config: DFlashConfig, kernels, dtype: torch.dtype = torch.float32, vocab: int = 211) -> TargetHead:
    generator = make_generator(99)
    table = torch.randn(vocab, config.hidden_size, generator=generator).to(dtype)
    return TargetHead(table, kernels.pack(table.clone()), torch.ones(config.hidden_size, dtype=dtype))


def proven_draft(config: DFlashConfig, dtype: torch.dtype, capacity: int, vocab: int = 211) -> CpuKernels:
    """With the target's head, which is of the draft's own size."""
    target = TARGET.products(BUCKETS, capacity=capacity, dtype=dtype, threads=torch.get_num_threads())
    listed = draft_products(config, target, capacity=capacity, vocab=vocab)
    head = Weight(vocab, config.hidden_size, most=HEAD_ROWS)
    return kernels_for(evolve(listed, weights=tuple({*listed.weights, head})), dtype, capacity)


def draft_of(config: DFlashConfig, tensors: Tensors | None = None, dtype: torch.dtype = torch.float32, **options):
    shape = {"slots": 4, "capacity": 1200} | options
    kernels = shape.pop("kernels", None) or proven_draft(config, dtype, shape["capacity"]).copy_for_shard()
    weights = tensors or random_tensors(config)
    return DFlashDraft(
        config, weights, kernels, head_of(config, kernels.copy_for_shard(), dtype), DraftPlacement(dtype=dtype, **shape)
    )


def aux_hidden_states_of(config: DFlashConfig, count: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    """Return random auxiliary hidden states of a target for `count` rows: `[K, count, D]`."""
    generator = make_generator(seed)
    return torch.randn(len(config.aux_layers), count, config.hidden_size, generator=generator).to(dtype)


def extend(draft: DFlashDraft, bucket: int, *parts: tuple[int, int, Tensor]) -> None:
    """Parts are (slot, start, auxiliary hidden states `[K, rows, D]`); what the auxiliary hidden states hold for
    padded rows is garbage."""
    step = Step(tuple(Segment(slot, start, rows.shape[1]) for slot, start, rows in parts), bucket)
    every = torch.cat([rows for _, _, rows in parts], 1)
    aux_hidden_states = {}
    for index, layer in enumerate(draft.aux_layers):
        aux_hidden_states[layer] = torch.full((bucket, every.shape[2]), 3e4, dtype=every.dtype)
        aux_hidden_states[layer][: every.shape[1]] = every[index]
    draft.extend(step, torch.zeros(step.rows, dtype=torch.int64), aux_hidden_states)


def extend_in_pieces(draft: DFlashDraft, rows: Tensor, pieces: list[tuple[int, int]], slot: int = 0) -> None:
    """Pieces are (bucket, rows), the last one repeated."""
    at, index = 0, 0
    while at < rows.shape[1]:
        bucket, count = pieces[min(index, len(pieces) - 1)]
        extend(draft, bucket, (slot, at, rows[:, at : at + count]))
        at, index = at + count, index + 1


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, positions: list[int], rotary: Rotary) -> Tensor:
    """x `[rows, heads, hd]`, pair (i, i + hd / 2) turned by position times frequency i."""
    half = rotary.head_dim // 2
    pairs = [slow_frequency(rotary, i) for i in range(half)]
    angles = [[position * frequency for frequency, _ in pairs] for position in positions]
    cos, sin = (
        x.new_tensor([[turn(at) * scale for at, (_, scale) in zip(row, pairs, strict=True)] for row in angles])[:, None]
        for turn in (math.cos, math.sin)
    )
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def slow_frequency(rotary: Rotary, i: int) -> tuple[float, float]:
    plain = rotary.theta ** (-2 * i / rotary.head_dim)
    yarn = rotary.scaling
    if yarn is None:
        return plain, 1.0

    def pair_that_turns(turns: float) -> float:
        return rotary.head_dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low = max(math.floor(pair_that_turns(yarn.fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.slow)), rotary.head_dim - 1)
    divided = min(max((i - low) / (high - low), 0), 1)
    return plain * (1 - divided) + plain / yarn.factor * divided, yarn.attention


def slow_logits(
    config: DFlashConfig, tensors: Tensors, table: Tensor, *, aux_hidden_states: Tensor, first: int, tokens: list[int]
) -> Tensor:
    """Float64 logits `[rows, V]` of a block `tokens` behind context rows `[first, n)` that auxiliary hidden states
    give."""
    hidden = slow_hidden(config, tensors, table, aux_hidden_states=aux_hidden_states, first=first, tokens=tokens)
    return hidden @ table.double().T


def entered(config: DFlashConfig, weights: dict[str, Tensor], name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what goes into attention or a feed-forward, and the factors of its result; None where there is no
    convolution.
    """
    if config.parts.convolution is None:
        return x, None
    factors = (x @ weights[name + "kernel_projection.weight"].T).view(len(x), 2, config.parts.convolution.taps, -1)
    return convolved(config, weights[name + "base_kernel"][0], factors[:, 0], x), factors[:, 1]


def convolved(config: DFlashConfig, base: Tensor, factors: Tensor | None, x: Tensor) -> Tensor:
    """One number after the other."""
    shape = config.parts.convolution
    if shape is None or factors is None:
        return x
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(shape.taps, row + 1)):
            wide = factors[row, tap].repeat_interleave(shape.group)
            out[row] += (base[tap] + wide) * x[row - tap]
    return out


def slow_hidden(
    config: DFlashConfig, tensors: Tensors, table: Tensor, *, aux_hidden_states: Tensor, first: int, tokens: list[int]
) -> Tensor:
    """The same block's hidden states behind the last norm, float64 `[rows, D]`."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    eps, head, group = config.rms_norm_eps, config.head_dim, config.num_heads // config.num_kv_heads
    count, size = aux_hidden_states.shape[1], len(tokens)
    fused = aux_hidden_states.double().permute(1, 0, 2).reshape(count, -1) @ weights["fc.weight"].T
    context = norm(fused, weights["hidden_norm.weight"], eps)[first:]
    x = table.double()[tokens] * config.parts.embedding_scale
    here = list(range(count, count + size))
    for layer, mask in enumerate(config.masks):
        name = f"layers.{layer}."

        def of(part: str, rows: Tensor, name: str = name) -> Tensor:
            return rows @ weights[name + part].T

        h = norm(x, weights[name + "input_layernorm.weight"], eps)
        h, far = entered(config, weights, name + "attention_conv.", h)
        q = norm(of("self_attn.q_proj.weight", h).view(size, -1, head), weights[name + "self_attn.q_norm.weight"], eps)
        both = torch.cat((context, h))
        k = of("self_attn.k_proj.weight", both).view(len(both), -1, head)
        k = turned(
            norm(k, weights[name + "self_attn.k_norm.weight"], eps), [*range(first, count), *here], config.rotary
        )
        v = of("self_attn.v_proj.weight", both).view(len(both), -1, head)
        q = turned(q, here, config.rotary)
        attended = torch.zeros(size, config.num_heads, head, dtype=torch.float64)
        for row, position in enumerate(here):
            seen = [
                key - first
                for key in range(first, count + size)
                if not (mask.causal and key > position) and not (mask.window and key <= position - mask.window)
            ]
            for number in range(config.num_heads):
                keys, values = k[seen, number // group], v[seen, number // group]
                attended[row, number] = (keys @ q[row, number] / head**0.5).softmax(0) @ values
        out = of("self_attn.o_proj.weight", attended.flatten(1))
        x = x + (out if far is None else convolved(config, weights[name + "attention_conv.base_kernel"][1], far, out))
        h = norm(x, weights[name + "post_attention_layernorm.weight"], eps)
        h, far = entered(config, weights, name + "mlp_conv.", h)
        gate, up = of("mlp.gate_proj.weight", h), of("mlp.up_proj.weight", h)
        out = of("mlp.down_proj.weight", gate * gate.sigmoid() * up)
        x = x + (out if far is None else convolved(config, weights[name + "mlp_conv.base_kernel"][1], far, out))
    return norm(x, weights["norm.weight"], eps)


def save_assistant(folder: Path, target: dict[str, object], *, hidden: int = 32, seed: int = 3) -> object:
    """Write a random Gemma 4 assistant as transformers does, and return it. target: the configuration of its target,
    whose sizes of heads it has.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - seconds, and most files need it once

    own: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "initializer_range": 0.15,
        "dtype": "float32",
    }
    text = AutoConfig.for_model("gemma4_text", **target | own)
    config = AutoConfig.for_model("gemma4_assistant", text_config=text, backbone_hidden_size=target["hidden_size"])
    torch.manual_seed(seed)
    # transformers 5.23 wants a layer that makes the rows, although the layers of an assistant all read others' rows.
    reading = property(lambda one: ["reuse"] * one.num_hidden_layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(text), "kv_sharing_modes", reading)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 + ("norm" in name))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.9)
    model.save_pretrained(folder)
    return model


# Names of what a prediction head has around its layer: what joins its inputs, the norms of the embedding and of the
# hidden state, and the final norm.
DEEPSEEK_HEAD = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
MIMO_HEAD = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")


def save_own_head(folder: Path, model_type: str, settings: dict[str, Any]) -> object:
    """Add a random prediction head to a checkpoint, as published with models of this type.

    Returns the oracle, a model of the head's layer whose final norm is the head's.
    """
    is_mimo = model_type == "mimo"
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    sparse = {} if is_mimo else {"first_k_dense_replace": 0}
    if model_type == "glm4_moe_lite":
        sparse = {"mlp_layer_types": ["sparse"]}
    with TemporaryDirectory() as temporary:
        head = save_model(Path(temporary), model_type, **{**settings, "num_hidden_layers": 1, **sparse}, seed=1)
        found = load_file(Path(temporary) / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.mtp_layers.0." if is_mimo else f"model.layers.{layers}."
    for name, tensor in found.items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0.", prefix, 1)] = tensor
    generator = make_generator(2)
    hidden = found["model.norm.weight"].shape[0]
    join, *norms, last = MIMO_HEAD if is_mimo else DEEPSEEK_HEAD
    tensors[f"{prefix}{join}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.15
    tensors[f"{prefix}{last}.weight"] = found["model.norm.weight"]
    for name in norms:
        tensors[f"{prefix}{name}.weight"] = 1 + torch.randn(hidden, generator=generator) * 0.2
    if not is_mimo:
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return head
