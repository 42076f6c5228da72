import os, time, statistics
import torch
from attrs import define
from adapters.models.kernels.cuda.attention import CHAIN_AHEAD, LOG2_E, SPLIT, CudaAttention
from adapters.models.kernels.cuda.descriptors import cache_sizes, describe_blocks, launch_options, page_size
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.products import CudaProducts
from adapters.models.kernels.cuda.step_tiles import TileKind
from adapters.models.kernels.cuda.tiles import KV_TILE, count_parts
from adapters.models.kernels.triton.hopper import hopper_chain
from adapters.models.kernels.triton_launch import launch
from benchmarks.candidates import chain_deep, chain_memory, chain_overlapped, chain_pair, chain_turns, wide
dev = torch.device("cuda")
K = {"serving": hopper_chain.attend_chain_ahead, "overlap": chain_overlapped.attend_chain_overlapped, "memory": chain_memory.attend_chain_memory,
     "deep": chain_deep.attend_chain_deep, "turns": chain_turns.attend_chain_turns, "pair": chain_pair.attend_chain_pair}
ASIDE = {}
def attend(kern, opts, planner, pdl, q, kc, vc, batch, out):
    _, heads, head = q.shape
    slots, kv, cap = cache_sizes(kc, batch)
    o = CHAIN_AHEAD[head] | opts
    c = 2 if kern == "pair" else o["CONSUMERS"]
    tiles = planner.find_tiles(batch, TileKind(c * (64 // (heads // kv))), slots)
    more = ()
    if kern == "pair":
        o = {n: o[n] for n in ("K_STAGES", "V_STAGES")} | {"ASIDE": head == 256}
        size = len(tiles) * kv * 128 * head if head == 256 else 1
        if size not in ASIDE: ASIDE[size] = torch.empty(size, device=dev)
        more = (ASIDE[size],)
    launch(K[kern], (len(tiles) * kv,), q, *(describe_blocks(x.view(-1, head), KV_TILE, head) for x in (kc, vc)), tiles, out, *more,
        batch.positions if batch.pages is None else batch.pages, cap, len(tiles), head**-0.5 * LOG2_E, HEADS=heads, KV=kv, GROUP=heads // kv, SPLIT=SPLIT, **o,
        PAGE=page_size(kc, batch), enable_fp_fusion=False, **launch_options(4 if c == 2 else 8, pdl))
@define(eq=False)
class Attention(CudaAttention):
    kern: str = "overlap"
    opts: dict = {}
    def _chain_ahead(self, q, k_cache, v_cache, batch, out):
        attend(self.kern, self.opts, self.planner, self.pdl, q, k_cache, v_cache, batch, out)
def raw(x, w, out, gated, cols, stages, group, pdl):
    n, depth = x.shape
    width = cols // 2 if gated else min(cols, 128)
    d = (describe_blocks(x, 64, 64), describe_blocks(w, cols, 64), describe_blocks(out, 64, width))
    programs = min(count_parts(n, 128) * count_parts(len(w), cols), 132)
    launch(wide.linear_wide_ahead, (programs,), *d, n, len(w), depth, **(launch_options(4, pdl) | {"STAGES": stages, "GROUP": group, "GATED": gated}))
@define
class Products(CudaProducts):
    how: str = "torch"
    def multiply(self, x, w, out, *, gated, piece=0):
        if len(x) != 1024 or gated or piece: return super().multiply(x, w, out, gated=gated, piece=piece)
        if self.how == "torch": torch.mm(x, w.t(), out=out)
        else:
            cfg = {(6144, 4096): (128, 6, 8), (4096, 4096): (256, 4, 16), (4096, 12288): (256, 4, 2)}.get(tuple(w.shape))
            if cfg is None: return super().multiply(x, w, out, gated=gated, piece=piece)
            raw(x, w, out, gated, *cfg, self.pdl)
def make(attention, products):
    kernels = TritonKernels(dev)
    own = (kernels.traits.processors, kernels.traits.shared, kernels.pdl, True)
    if attention: kernels._attention = Attention(dev, *own, *attention)
    if products: kernels.products = Products(*own, kernels.traits.capability.takes_plain_pointers, products)
    return kernels
