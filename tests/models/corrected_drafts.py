"""Random drafts of DFlash 2 and DSpark, and what they propose, straight from the equations in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from attrs import evolve
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.correction import LEAST_CHANCE
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.dflash.parts import (
    ConvolutionShape,
    DraftParts,
    LogitScale,
    MarkovShape,
    SelectorShape,
)
from tests.models.draft_models import FULL, TARGET, Tensors, config_of, random_tensors, slides, slow_hidden
from tests.models.ggufs import add

VOCAB = TARGET.vocab_size


def dflash2(vocab: int = VOCAB, *, taps: int = 2, **more: Any) -> DraftParts:
    """Return the parts of a DFlash 2 draft as they are published, but of few columns: two taps, groups of 16 columns,
    16 candidates.
    """
    return DraftParts(ConvolutionShape(taps, 16), SelectorShape(vocab, 32, 16), **more)


def dspark(vocab: int = VOCAB, kind: str = "vanilla", *, from_anchor: bool = True, **more: Any) -> DraftParts:
    return DraftParts(markov=MarkovShape(vocab, kind, 32, **more), from_anchor=from_anchor)  # type: ignore[arg-type]


CORRECTED = {
    "DFlash 2": config_of(parts=dflash2(), masks=(slides(40, causal=False), slides(40, causal=False), FULL)),
    "DFlash 2, three taps, scaled": config_of(
        parts=dflash2(taps=3, embedding_scale=0.5, scale=LogitScale(0.4, 8.0)), block=8
    ),
    "DSpark": config_of(parts=dspark(has_confidence=True), block=8),
    "DSpark, gated": config_of(parts=dspark(kind="gated"), block=8),
    "DSpark, recurrent": config_of(parts=dspark(kind="rnn", has_confidence=True, confidence_sees_token=False), block=8),
    "DSpark, first row unused": config_of(parts=dspark(from_anchor=False), block=16),
}


def tensors_of(config: DFlashConfig, *, sure: bool = True, seed: int = 0) -> Tensors:
    """sure: the confidence head, if there is one, takes each proposal for right."""
    tensors = random_tensors(config, seed)
    if sure and "confidence_head.proj.bias" in tensors:
        tensors["confidence_head.proj.bias"] = torch.tensor([30.0])
    return tensors


class Picked:
    """Picks the likeliest token, and keeps what it got."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logits: list[list[Tensor]] = [[] for _ in range(count)]

    def __call__(self, parts: Sequence[Tensor]) -> list[list[int]]:
        found = [part.argmax(-1).tolist() for part in parts]
        for index, part in enumerate(parts):
            self.tokens[index] += found[index]
            self.logits[index] += list(part.clone())
        return found


def proposed(draft: DFlashDraft, requests: Sequence[BlockRequest]) -> Picked:
    picked = Picked(len(requests))
    draft.propose(requests, picked)
    return picked


def slow_proposals(
    config: DFlashConfig, tensors: Tensors, table: Tensor, aux_hidden_states: Tensor, request: BlockRequest
) -> tuple[list[int], list[Tensor]]:
    """The greedy proposals to one request, and the corrected logits `[V]` of each place."""
    size = 4
    while size < request.count + config.lead:
        size *= 2
    block = [request.token, *[config.mask_token_id] * (min(size, config.rows) - 1)]
    hidden = slow_hidden(
        config, tensors, table, aux_hidden_states=aux_hidden_states, first=request.first, tokens=block
    )[config.lead :]
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    logits = hidden @ table.double().T * config.parts.scale.multiplier
    if config.parts.scale.cap:
        logits = config.parts.scale.cap * (logits / config.parts.scale.cap).tanh()
    token, chance, state = request.token, 1.0, torch.zeros(32, dtype=torch.float64)
    tokens, found = list[int](), list[Tensor]()
    for place in range(request.count):
        row, h = logits[place], hidden[place]
        if config.parts.selector is not None:
            row = selected(config.parts.selector, weights, row, h, token)
        else:
            assert config.parts.markov is not None
            embedded = weights["markov_head.markov_w1.weight"][token]
            if config.parts.markov.has_confidence:
                seen = torch.cat((h, embedded)) if config.parts.markov.confidence_sees_token else h
                score = weights["confidence_head.proj.weight"][0] @ seen + weights["confidence_head.proj.bias"][0]
                chance *= score.sigmoid().item()
                if chance < LEAST_CHANCE:
                    break
            latent, state = latent_of(config.parts.markov.kind, weights, h, embedded, state)
            row = row + weights["markov_head.markov_w2.weight"] @ latent
        token = int(row.argmax())
        tokens.append(token)
        found.append(row)
    return tokens, found


def selected(shape: SelectorShape, weights: dict[str, Tensor], row: Tensor, h: Tensor, token: int) -> Tensor:
    gate = weights["candidate_selector.hidden_projection.weight"] @ h
    out = torch.full_like(row, -torch.inf)
    for candidate in row.topk(shape.candidates).indices.tolist():
        edge = weights["candidate_selector.predecessor_codebook"][token] * gate
        out[candidate] = row[candidate] + edge @ weights["candidate_selector.successor_codebook"][candidate]
    return out


def latent_of(
    kind: str, weights: dict[str, Tensor], h: Tensor, embedded: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    if kind == "vanilla":
        return embedded, state
    name = "markov_head.gate_proj" if kind == "gated" else "markov_head.joint_proj"
    seen = (h, embedded) if kind == "gated" else (state, embedded, h)
    projected = weights[f"{name}.weight"] @ torch.cat(seen) + weights[f"{name}.bias"]
    if kind == "gated":
        return projected.sigmoid() * embedded, state
    gate, candidate, out = projected.chunk(3)
    return out.tanh(), gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()


# --- GGUF files ---

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
NAMES = {
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
OWN_NAMES = {
    "dflash": {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"},
    "lucebox": {"fc.weight": "dflash.fc.weight", "hidden_norm.weight": "dflash.hidden_norm.weight"},
}


def write_draft_gguf(
    path: Path,
    config: DFlashConfig,
    tensors: Tensors,
    kind: Kind = Kind.F32,
    *,
    architecture: str = "dflash",
    renamed: dict[str, str] | None = None,
    **fields: Any,
) -> Path:
    """A draft as one file. architecture: `dflash`, as llama.cpp's converter writes it, or Lucebox's.

    fields: further ones by their names behind the architecture's, or whole names with a prefix `tokenizer_`; None for
    those that are left out. renamed: other names of tensors.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**gguf_fields(config, architecture), **fields}.items():
        add(writer, name if name.startswith("tokenizer.") else f"{architecture}.{name}", value)
    for name, tensor in tensors.items():
        stored = stored_name(name, architecture)
        stored = (renamed or {}).get(stored, stored)
        data = np.ascontiguousarray(tensor.float().numpy())
        wide = data.ndim != 2 or data.shape[0] == 1
        if wide or data.shape[1] % 32:
            writer.add_tensor(stored, data, raw_dtype=Kind.F32)
        else:
            writer.add_tensor(stored, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_name(name: str, architecture: str) -> str:
    own = OWN_NAMES["dflash" if architecture == "dflash" else "lucebox"]
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{LAYER_NAMES[rest]}"
    return own.get(name) or NAMES[name]


def gguf_fields(config: DFlashConfig, architecture: str) -> dict[str, Any]:
    is_mainline = architecture == "dflash"
    own = "" if is_mainline else "dflash."
    found: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": 4096,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rotary.theta),
        f"{own}block_size": config.rows,
    }
    if is_mainline:
        found["target_layers"] = [layer + 1 for layer in config.aux_layers]
        found["tokenizer.ggml.mask_token_id"] = config.mask_token_id
    else:
        found["dflash.target_layer_ids"] = list(config.aux_layers)
        found["dflash.n_target_layers"] = len(config.aux_layers)
        found["dflash.mask_token_id"] = config.mask_token_id
    windows = {mask.window for mask in config.masks if mask.window}
    if windows:
        found["attention.sliding_window"] = windows.pop()
        found["attention.sliding_window_pattern"] = [mask.window > 0 for mask in config.masks]
    if config.parts.selector is not None and config.parts.convolution is not None:
        found |= {
            f"{own}conv_kernel_size": config.parts.convolution.taps,
            f"{own}conv_group_size": config.parts.convolution.group,
            f"{own}selector_rank": config.parts.selector.rank,
            f"{own}selector_top_k": config.parts.selector.candidates,
            "attention.causal": False,
        }
    return found


def without_causal(config: DFlashConfig) -> DFlashConfig:
    """The same with layers that see the whole block, as files of DFlash 2 say."""
    return evolve(config, masks=tuple(evolve(mask, causal=False) for mask in config.masks))
