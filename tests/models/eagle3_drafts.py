"""Random EAGLE-3 drafts, their folders and GGUF files, and what they propose, straight from the formulas in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor

from adapters.models.decoder.config.dense_config import HEAD_ROWS
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.shard import BUCKETS, TargetHead
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.drafts.eagle3.checkpoint import list_eagle3_tensors
from adapters.models.drafts.eagle3.config import Eagle3Config, Eagle3Norms
from adapters.models.drafts.eagle3.draft import Eagle3Draft
from adapters.models.drafts.eagle3.weights import list_eagle3_products
from adapters.models.drafts.kept_states import KEPT_STATES
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.kernels.step import Segment, Step
from tests.models.checkpoints import kernels_for
from tests.models.corrected_drafts import Picked
from tests.models.draft_models import TARGET, Tensors, norm, turned
from tests.models.ggufs import add

SLOTS, CAPACITY = 4, 512
CPU = torch.device("cpu")
PLAIN = Eagle3Config(64, 104, 4, 2, 16, Rotary(16, 1e4), (1, 3, 5), 64, vocab=80, has_map=True)
KINDS = {
    "reduced vocabulary": PLAIN,
    "normed residual, own embedding, whole vocabulary": evolve(
        PLAIN, vocab=211, has_map=False, has_embedding=True, norms=Eagle3Norms(before_residual=True)
    ),
    "the target's head": evolve(PLAIN, vocab=0, has_map=False),
    "all other norms, five layers": evolve(
        PLAIN, aux_layers=(0, 2, 4, 6, 8), norms=Eagle3Norms(before_fc=True, each_layer=True, output=True)
    ),
    "another width than the target": evolve(PLAIN, hidden_size=48, head_dim=32, has_embedding=True),
}
KINDS["another width than the target"] = evolve(
    KINDS["another width than the target"], rotary=Rotary(32, 1e4), num_heads=2, num_kv_heads=1
)


def random_eagle3(config: Eagle3Config, seed: int = 0, vocab: int = TARGET.vocab_size) -> Tensors:
    """Weights as a draft reads them: `d2t` has tokens, in an order of its own."""
    generator = make_generator(seed)
    shapes = dict(list_eagle3_tensors(config))
    if config.has_embedding:
        shapes["embed_tokens.weight"] = (vocab, config.hidden_size)
    made = Tensors()
    for name, shape in shapes.items():
        if name == "d2t":
            made[name] = torch.randperm(vocab, generator=generator)[: config.vocab].sort().values
            continue
        tensor = torch.randn(shape, generator=generator)
        made[name] = tensor * 0.2 + 1 if len(shape) == 1 else tensor * 1.5 * shape[1] ** -0.5
    return made


def prove_kernels(config: Eagle3Config, dtype: torch.dtype = torch.float32) -> CpuKernels:
    """Return kernels for a draft of `TARGET`."""
    listed = TARGET.products(BUCKETS, capacity=CAPACITY, dtype=dtype, threads=torch.get_num_threads())
    own = list_eagle3_products(config, listed, capacity=CAPACITY, vocab=TARGET.vocab_size)
    head = Weight(TARGET.vocab_size, TARGET.hidden_size, most=HEAD_ROWS)
    return kernels_for(evolve(own, weights=tuple(dict.fromkeys((*own.weights, head)))), dtype, CAPACITY)


def draft_of(config: Eagle3Config, tensors: Any = None, dtype: torch.dtype = torch.float32) -> Eagle3Draft:
    kernels = prove_kernels(config, dtype)
    head = target_head(kernels.copy_for_shard(), dtype)
    placement = DraftPlacement(dtype=dtype, slots=SLOTS, capacity=CAPACITY)
    weights = random_eagle3(config) if tensors is None else tensors
    return Eagle3Draft(config, weights, kernels.copy_for_shard(), head, placement)


def target_head(kernels: Any, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> TargetHead:
    table = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=make_generator(99)).to(device, dtype)
    return TargetHead(table, kernels.pack(table.clone()), torch.ones(TARGET.hidden_size, dtype=dtype, device=device))


def taps_of(config: Eagle3Config, count: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    """Return random hidden states that a target leaves for `count` rows: `[K, count, width]`."""
    generator = make_generator(seed)
    return torch.randn(len(config.aux_layers), count, config.target_hidden_size, generator=generator).to(dtype)


def follow(draft: Eagle3Draft, slot: int, tokens: Tensor, taps: Tensor, pieces: list[int], *, start: int = 0) -> None:
    """pieces: rows of each step, the last one repeated. What the taps hold for padded rows is garbage."""
    at, index = start, 0
    while at < len(tokens):
        count = min(pieces[min(index, len(pieces) - 1)], len(tokens) - at)
        bucket = next(one for one in BUCKETS if one >= count)
        left = {}
        for number, layer in enumerate(draft.aux_layers):
            left[layer] = torch.full((bucket, taps.shape[2]), 3e4, dtype=taps.dtype)
            left[layer][:count] = taps[number, at : at + count]
        draft.extend(Step((Segment(slot, at, count),), bucket), tokens[at : at + count], left)
        at, index = at + count, index + 1


def proposed(draft: Any, *requests: BlockRequest) -> Picked:
    picked = Picked(len(requests))
    draft.propose(requests, picked)
    return picked


def slow_proposals(
    config: Eagle3Config, tensors: Mapping[str, Tensor], tokens: Tensor, taps: Tensor, request: BlockRequest
) -> tuple[list[int], list[Tensor]]:
    """The greedy proposals to one request, and the logits `[V]` of each place.

    Every row is computed anew for each place. A row continues the state of the row before it, from the target's taps or
    from the draft itself. Context rows at multiples of 64 have no state, and the sequence's first row is not seen.
    """
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    head = target_head(SimpleKernels())
    table = weights.get("embed_tokens.weight", head.embedding.double())
    eps, norms = config.rms_norm_eps, config.norms
    given = taps.double()[:, : request.position]
    if norms.each_layer:
        scales = [weights[f"fc_norm.{number}.weight"] for number in range(len(given))]
    fused = given.permute(1, 0, 2).reshape(request.position, -1)
    if norms.before_fc:
        fused = norm(fused, weights["input_norm.weight"], eps)
    if norms.each_layer:
        fused = torch.cat(
            [norm(part, scale, eps) for part, scale in zip(fused.chunk(len(scales), 1), scales, strict=True)], 1
        )
    states = list(fused @ weights["fc.weight"].T)
    so_far = [*tokens[: request.position].tolist(), request.token]
    found, logits = list[int](), list[Tensor]()
    for place in range(request.count):
        first = max(1, request.first)
        before = [
            torch.zeros_like(states[0]) if at % KEPT_STATES == 0 and at < request.position else states[at - 1]
            for at in range(first, request.position + place + 1)
        ]
        x = slow_layer(config, weights, table[so_far[first:]], torch.stack(before), first)
        out = norm(x, weights["norm.weight"], eps)
        states.append(out if norms.output else x)
        row = out @ (weights["lm_head.weight"] if config.vocab else head.embedding.double()).T
        if config.has_map:
            row = torch.full((TARGET.vocab_size,), -torch.inf, dtype=torch.float64).index_copy(0, tensors["d2t"], row)
        logits.append(row)
        found.append(int(row.argmax()))
        so_far.append(found[-1])
    return found, logits


def slow_layer(
    config: Eagle3Config, weights: Mapping[str, Tensor], embedded: Tensor, states: Tensor, first: int
) -> Tensor:
    """The residual stream `[D]` of the last row. Rows are at the positions from `first` on."""
    name, eps, head = "layers.0.", config.rms_norm_eps, config.head_dim
    group = config.num_heads // config.num_kv_heads

    def of(part: str, rows: Tensor) -> Tensor:
        return rows @ weights[name + part].T

    normed = norm(states, weights[name + "hidden_norm.weight"], eps)
    x = torch.cat((norm(embedded, weights[name + "input_layernorm.weight"], eps), normed), 1)
    positions = list(range(first, first + len(x)))
    q, k = (
        turned(of(f"self_attn.{part}_proj.weight", x).view(len(x), -1, head), positions, config.rotary) for part in "qk"
    )
    v = of("self_attn.v_proj.weight", x).view(len(x), -1, head)
    heads = [
        (k[:, number // group] @ q[-1, number] / head**0.5).softmax(0) @ v[:, number // group]
        for number in range(config.num_heads)
    ]
    residual = (normed if config.norms.before_residual else states)[-1]
    residual = residual + of("self_attn.o_proj.weight", torch.cat(heads))
    h = norm(residual, weights[name + "post_attention_layernorm.weight"], eps)
    gate, up = of("mlp.gate_proj.weight", h), of("mlp.up_proj.weight", h)
    return residual + of("mlp.down_proj.weight", gate * gate.sigmoid() * up)


class SimpleKernels:
    """Packs nothing."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight


# --- folders and files ---


def save_eagle3(
    folder: Path,
    config: Eagle3Config,
    tensors: Mapping[str, Tensor],
    layout: str = "sglang",
    *,
    vocab: int = TARGET.vocab_size,
    **changes: Any,
) -> Path:
    """A folder as published. layout: "sglang" (SpecForge's), "vllm" or "speculators". vocab: tokens of the target. A
    change to "absent" leaves the field out.
    """
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rotary.theta,
        "vocab_size": vocab,
    }
    own: dict[str, Any] = {"draft_vocab_size": config.vocab or None, "tie_word_embeddings": False}
    own["norm_before_residual"] = config.norms.before_residual
    own |= {"norm_before_fc": config.norms.before_fc, "fc_norm": config.norms.each_layer}
    own["norm_output"] = config.norms.output
    if layout == "sglang":
        ids = {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers), "use_aux_hidden_state": True}
        raw = {**layer, **own, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}
    else:
        own["eagle_aux_hidden_state_layer_ids"] = [number + 1 for number in config.aux_layers]
        raw = {**layer, **own, "architectures": ["Eagle3LlamaForCausalLM"]}
    if layout == "speculators":
        raw = {**own, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        raw["transformer_layer_config"] = layer
    raw |= {"target_hidden_size": config.target_hidden_size, **changes}
    folder.mkdir(exist_ok=True, parents=True)
    kept = {name: value for name, value in raw.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file(published(tensors, layout, vocab), folder / "model.safetensors")
    return folder


def published(tensors: Mapping[str, Tensor], layout: str, vocab: int) -> dict[str, Tensor]:
    """The tensors under the names of a layout, with `d2t` as differences and its inverse beside it."""
    found = {
        name.replace("layers.0.", "midlayer.") if layout == "sglang" else name: tensor
        for name, tensor in tensors.items()
    }
    if "d2t" in found:
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, found["d2t"], True)
        found["d2t"] = found["d2t"] - torch.arange(len(found["d2t"]))
    return found


GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "d2t": "d2t",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    **{f"layers.0.self_attn.{part}_proj.weight": f"blk.0.attn_{part}.weight" for part in "qkv"},
    **{f"layers.0.mlp.{part}_proj.weight": f"blk.0.ffn_{part}.weight" for part in ("gate", "up", "down")},
}


def write_eagle3_gguf(
    path: Path, config: Eagle3Config, tensors: Mapping[str, Tensor], *, layers: str = "target_layers", **fields: Any
) -> Path:
    """A file as llama.cpp's converter writes it. layers: the name of the list of layers. fields: further ones by their
    names behind the architecture's, or whole names of the tokenizer; None for those that are left out.
    """
    writer = gguf.GGUFWriter(path, "eagle3")
    found: dict[str, Any] = {
        "block_count": 1,
        "context_length": 4096,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rotary.theta),
        "vocab_size": TARGET.vocab_size,
        layers: [number + 1 for number in config.aux_layers],
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norms.before_residual,
        **fields,
    }
    for name, value in found.items():
        add(writer, name if name.startswith("tokenizer.") else f"eagle3.{name}", value)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    for name, tensor in tensors.items():
        part = name.removeprefix("layers.0.self_attn.")[:1]
        data = tensor if name == "d2t" else tensor.float()
        if part in heads and name.endswith("_proj.weight"):
            data = data.view(heads[part], 2, -1, data.shape[1]).transpose(1, 2).reshape(data.shape)
        writer.add_tensor(GGUF_NAMES.get(name, name), np.ascontiguousarray(data.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
