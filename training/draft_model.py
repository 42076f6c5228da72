"""DFlash for training: the published parameters, and one forward over many blocks of the same sequences.

A draft proposes a block of tokens at once: the anchor, which is known, and a mask in every other slot. Its layers all
attend to what the target left at the tokens before the anchor (the context: the outputs of some target layers, fused
into one vector a token) and to every slot of the block. Embedding and head are the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn import functional

from training.chat_format import CONTROLS, MASK
from training.model import DecoderBlock, Geometry, Norm, Qwen3, SelfAttention, rotate

MASK_ID = CONTROLS.index(MASK)
GROUP = 512
"""BlockSlots that share one copy of the context's keys in a forward, at most."""


@frozen
class DraftGeometry:
    """The sizes of a draft: `layers` layers of the target's own sizes.

    aux_layers: the target's layers whose outputs it reads, counted from 0, ascending.
    """

    target: Geometry = field(factory=Geometry)
    layers: int = 3
    aux_layers: tuple[int, ...] = (1, 3, 5, 7, 9)
    block: int = 16
    """Most slots of a block, the anchor's included."""


@frozen(eq=False)
class BlockSlots:
    """Blocks side by side, all [rows, slots]: where each slot is, where its block begins, and which block that is.

    A block sees the context before its anchor and all of itself. `group`: slots that share a copy of the context's
    keys.
    """

    positions: Tensor
    anchors: Tensor
    numbers: Tensor
    group: int

    @staticmethod
    def of(anchors: Mapping[int, Tensor]) -> BlockSlots:
        """Return the slots of blocks. anchors: [rows, blocks] for each size of blocks (powers of two, largest first).

        Raises ValueError where a group would cut a block.
        """
        positions, firsts, numbers, count = [], [], [], 0
        for size, some in anchors.items():
            along = torch.arange(size, device=some.device)
            positions.append((some.unsqueeze(-1) + along).flatten(1))
            firsts.append(some.repeat_interleave(size, 1))
            numbers.append((torch.arange(some.shape[1], device=some.device) + count).repeat_interleave(size))
            count += some.shape[1]
        every = torch.cat(numbers)
        group = math.gcd(len(every), GROUP)
        if group % max(anchors):
            raise ValueError(f"{len(every)} slots in groups of {group}: blocks of {max(anchors)} would be cut")
        return BlockSlots(torch.cat(positions, 1), torch.cat(firsts, 1), every.expand(len(positions[0]), -1), group)

    def visible(self, length: int) -> Tensor:
        """Return the mask of what each slot attends to, in the context and then in its group.

        bool [groups, 1, slots, length + slots].
        """
        anchors, numbers = (part.reshape(-1, self.group, 1) for part in (self.anchors, self.numbers))
        before = torch.arange(length, device=anchors.device) < anchors
        return torch.cat((before, numbers == numbers.mT), -1).unsqueeze(1)


class DraftNetwork(nn.Module):
    """`state_dict` has the names and shapes of a published DFlash checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        target = geometry.target
        self.geometry = geometry
        self.fc = nn.Linear(len(geometry.aux_layers) * target.hidden, target.hidden, bias=False)
        self.hidden_norm = Norm(target.hidden, target.eps)
        self.layers = nn.ModuleList(DecoderBlock(target) for _ in range(geometry.layers))
        self.norm = Norm(target.hidden, target.eps)
        powers = torch.arange(0, target.head_dim, 2).double() / target.head_dim
        turns = torch.outer(torch.arange(target.context + geometry.block).double(), target.theta**-powers)
        self.register_buffer("cos", turns.cos().float(), persistent=False)
        self.register_buffer("sin", turns.sin().float(), persistent=False)

    @torch.no_grad()
    def inherit(self, target: Qwen3) -> None:
        """Copy the target's last layers and norm. The context begins as its last auxiliary layer, with some noise."""
        for mine, other in zip(self.layers, target.model.layers[-len(self.layers) :], strict=True):
            mine.load_state_dict(other.state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        size = self.geometry.target.hidden
        self.fc.weight.normal_(std=0.3 / math.sqrt(self.fc.in_features))
        self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)

    def context(self, aux_layers: Tensor) -> Tensor:
        """Auxiliary hidden states [rows, length, auxiliary layers * hidden] to the context [rows, length, hidden]."""
        return self.hidden_norm(self.fc(aux_layers))

    def forward(self, context: Tensor, slots: BlockSlots, tokens: Tensor, step: Step | None = None) -> Tensor:
        """Hidden states of every slot after the last norm, for the target's head: [rows, slots, hidden].

        context: [rows, length, hidden], of positions 0, 1, ...  tokens: embeddings [rows, slots, hidden].
        step: `draft_step`, or the same compiled.
        """
        length = context.shape[1]
        own = self.cos[slots.positions].unsqueeze(1), self.sin[slots.positions].unsqueeze(1)
        before = self.cos[:length], self.sin[:length]
        visible = slots.visible(length)
        x = tokens
        for layer in layers_of(self.layers):
            x = (step or draft_step)(layer, x, context, (own, before), visible)
        return self.norm(x)


Angles = tuple[Tensor, Tensor]
Step = Callable[..., Tensor]
"""What one layer does."""


def draft_step(
    layer: DecoderBlock, x: Tensor, context: Tensor, angles: tuple[Angles, Angles], visible: Tensor
) -> Tensor:
    """A layer's output; the arguments are those of `attend`."""
    x = x + attend(layer.self_attn, layer.input_layernorm(x), context, angles, visible)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def layers_of(modules: nn.ModuleList) -> list[DecoderBlock]:
    """Return a model's layers with their type."""
    return [module for module in modules if isinstance(module, DecoderBlock)]


def attend(
    attention: SelfAttention, x: Tensor, context: Tensor, angles: tuple[Angles, Angles], visible: Tensor
) -> Tensor:
    """x: [rows, slots, hidden].  angles: of x and of the context.  visible: [rows * groups, 1, group's slots,
    length + group's slots], as `BlockSlots.visible` has it."""
    rows, _, _ = x.shape
    groups, slots = visible.shape[0] // rows, visible.shape[2]
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.dim

    def split(part: Tensor, count: int) -> Tensor:
        return part.view(rows, -1, count, dim).transpose(1, 2)

    def split_groups(part: Tensor, count: int) -> Tensor:
        """Reshape [rows, heads, groups * slots, dim] to [rows * groups, heads, slots, dim]."""
        return part.view(rows, count, groups, slots, dim).transpose(1, 2).reshape(-1, count, slots, dim)

    def repeat_for_groups(part: Tensor) -> Tensor:
        """Repeat the context's [rows, heads, length, dim] for every group."""
        return part.unsqueeze(1).expand(-1, groups, -1, -1, -1).flatten(0, 1)

    own, before = angles
    q = rotate(attention.q_norm(split(attention.q_proj(x), heads)), own)
    k = rotate(attention.k_norm(split(attention.k_proj(x), kv_heads)), own)
    context_k = rotate(attention.k_norm(split(attention.k_proj(context), kv_heads)), before)
    v, context_v = (split(attention.v_proj(part), kv_heads) for part in (x, context))
    keys = torch.cat((repeat_for_groups(context_k), split_groups(k, kv_heads)), -2)
    values = torch.cat((repeat_for_groups(context_v), split_groups(v, kv_heads)), -2)
    keys, values = (part.repeat_interleave(heads // kv_heads, 1) for part in (keys, values))
    mixed = functional.scaled_dot_product_attention(split_groups(q, heads), keys, values, attn_mask=visible)
    mixed = mixed.view(rows, groups, heads, slots, dim).transpose(2, 3)
    return attention.o_proj(mixed.reshape(rows, groups * slots, heads * dim))


def target_step(layer: DecoderBlock, x: Tensor, angles: Angles) -> Tensor:
    return layer(x, angles)


def read_target(
    target: Qwen3, tokens: Tensor, aux_layers: Sequence[int], step: Step = target_step
) -> tuple[Tensor, Tensor]:
    """Run the target on tokens [rows, length].

    Return the hidden states after its last norm [rows, length, hidden], and the outputs of the layers `aux_layers`,
    side by side [rows, length, auxiliary layers * hidden].
    """
    x = target.model.embed_tokens(tokens)
    angles = target.cos[: tokens.shape[1]], target.sin[: tokens.shape[1]]
    aux = []
    for index, layer in enumerate(layers_of(target.model.layers)):
        x = step(layer, x, angles)
        if index in aux_layers:
            aux.append(x)
    return target.model.norm(x), torch.cat(aux, -1)


def embed_blocks(target: Qwen3, tokens: Tensor, slots: BlockSlots) -> Tensor:
    """Return embeddings [rows, slots, hidden] of blocks over tokens [rows, length]: an anchor's token, then masks."""
    known = tokens.gather(1, slots.anchors)
    ids = known.masked_fill(slots.positions != slots.anchors, MASK_ID)
    return target.model.embed_tokens(ids)


def head(target: Qwen3, hidden: Tensor) -> Tensor:
    """Return logits in float32, since in bf16 the likeliest tokens would often tie. Must be called without autocast."""
    return functional.linear(hidden.float(), target.model.embed_tokens.weight.float())
