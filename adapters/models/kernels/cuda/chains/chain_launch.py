"""Launches of the kernel of Hopper's that `chain_choice` chooses for attention of many rows."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from adapters.models.kernels.cuda.chains.chain_choice import choose_chain
from adapters.models.kernels.cuda.descriptors import cache_sizes, launch_options, page_size
from adapters.models.kernels.cuda.split_attention import LOG2_E
from adapters.models.kernels.cuda.step_tiles import TileKind, TilePlanner
from adapters.models.kernels.cuda.tiles import SPLIT
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton_launch import launch


def attend_chain(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: Batch,
    rule: AttentionRule,
    unread: Tensor,
    planner: TilePlanner,
    pdl: bool | None,
    *,
    decode_rows: Tensor | None = None,
) -> Tensor:
    """Return what queries `[rows, H, HEAD]` attend to. Arguments: see `choose_chain`.

    decode_rows: the result, if decode rows are written in it (`CudaAttention.attends_apart`). The others are added.
    """
    out = torch.empty_like(q) if decode_rows is None else decode_rows
    _, heads, head = q.shape
    slots, kv, capacity = cache_sizes(caches[0], batch)
    group = heads // kv
    choice = choose_chain(q, caches, rule, unread)
    at_once = 64 * choice.consumers  # heads of a program
    parts = group // gcd(group, at_once)  # programs of a tile, which no row crosses
    kind = TileKind(at_once * parts // group, apart="" if decode_rows is None else "chains")
    tiles = planner.find_tiles(batch, kind, slots)
    launch(
        choice.kernel,
        (len(tiles) * parts * kv,),
        q,
        *choice.rows,
        tiles,
        out,
        batch.positions if batch.pages is None else batch.pages,  # never read without
        capacity,
        len(tiles),
        head**-0.5 * LOG2_E,
        *choice.sinks,
        HEADS=heads,
        KV=kv,
        GROUP=group,
        PARTS=parts,
        SPLIT=SPLIT,
        **choice.constants,
        PAGE=page_size(caches[0], batch),
        enable_fp_fusion=False,
        **launch_options(4 if choice.consumers == 2 else 8, pdl),
    )
    return out
