"""Chooses the kernel of Hopper's that attends with many rows, and describes keys and values to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from triton.experimental.gluon import language as gl

from adapters.models.kernels.cuda.descriptors import describe_blocks, shared_layout, word_layout
from adapters.models.kernels.cuda.split_attention import CODE_KINDS
from adapters.models.kernels.cuda.tiles import CHAIN_AHEAD, CODED_AHEAD, HALVED_CHAIN, HALVED_ROWS, KV_TILE, PLAIN_CHAIN
from adapters.models.kernels.formats.row_format import as_bytes, format_of
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.triton.hopper import hopper_chain, hopper_codes
from adapters.models.kernels.triton.hopper.chains import halved_chain, plain_chain


@frozen
class ChainChoice:
    """A kernel and its arguments. rows: keys and values. sinks: the last tensor, where the kernel takes one.

    consumers: groups of four warps of a program, each of which computes 64 rows; with one, eight warps share them.
    """

    kernel: Any
    rows: tuple[Any, ...]
    sinks: tuple[Tensor, ...]
    constants: Mapping[str, int | tuple[int, ...] | gl.NVMMASharedLayout]
    consumers: int


def choose_chain(q: Tensor, caches: tuple[Tensor, Tensor], rule: AttentionRule, unread: Tensor) -> ChainChoice:
    """Choose for queries `[rows, H, HEAD]` and the caches of keys and values. unread: stands for sinks that are none.

    `rule` has neither a cap nor latents.
    """
    head = q.shape[2]
    sinks = (unread if rule.sinks is None else rule.sinks,)
    rules = {"WINDOW": rule.window, "SINKS": rule.sinks is not None}
    if format_of(caches[0]).is_coded:
        tile = (KV_TILE, head)
        described = {
            "KINDS": tuple(CODE_KINDS[cache.dtype] for cache in caches),
            "APART": caches[0].stride(2) // 4,
            "TILE": tile,
            "NUMBERS": shared_layout(tile, q.dtype),
            "WORDS": word_layout(),
        }
        words = tuple(as_bytes(cache).view(torch.int32) for cache in caches)
        options = CODED_AHEAD[head]
        constants = {**rules, **options, **described}
        return ChainChoice(hopper_codes.attend_coded_chain, words, sinks, constants, options["CONSUMERS"])
    rows = tuple(describe_blocks(cache.view(-1, head), KV_TILE, head) for cache in caches)
    if head in PLAIN_CHAIN and not rule.window and rule.sinks is None:
        return ChainChoice(plain_chain.attend_plain_chain, rows, (), PLAIN_CHAIN[head], 2)
    if len(q) > HALVED_ROWS and head in HALVED_CHAIN and not rule.window and rule.sinks is None:
        return ChainChoice(halved_chain.attend_halved_chain, rows, (), HALVED_CHAIN[head], 2)
    options = CHAIN_AHEAD[head]
    return ChainChoice(hopper_chain.attend_chain_ahead, rows, sinks, {**rules, **options}, options["CONSUMERS"])
