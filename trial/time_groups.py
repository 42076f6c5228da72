"""Products of experts in MXFP4, old and new: time and bits."""
import statistics, time
import torch
from attrs import evolve
from adapters.checkpoint.packed_matrix import MXFP4
from adapters.models.numerics.synthetic import random_matrix
from adapters.models.kernels.cuda.packed import pack_steps
from adapters.models.kernels.cuda import packed_groups as pg
from adapters.models.kernels.cuda.descriptors import launch_options, shared_layout
from adapters.models.kernels.cuda.tiles import count_parts
from adapters.models.kernels.triton_launch import launch
from trial.old_groups import multiply_many_ahead as old_kernel

T0 = time.time()
D = torch.device("cuda")
E, K = 32, 4

def say(*a): print(f"[{time.time()-T0:5.1f}]", *a, flush=True)

def weights(rows, cols):
    one = pack_steps(random_matrix((rows, cols), MXFP4, "w", D, cols**-0.5), D, converts_e4m3=True)
    words = torch.stack([one.words.roll(i, 0) for i in range(E)]); levels = torch.stack([one.levels for _ in range(E)])
    return evolve(one, words=words, levels=levels)

def old(x, w, out, dealt, tile, share):
    form = w.block_form
    each = w.piece // form.block
    height = tile.pairs
    fits = ((227 << 10) - height * 128 * 4) // (height * form.block * 2)
    launch(old_kernel, (len(dealt.tiles) * count_parts(w.outputs, 128),), *w.tensors, x, out, dealt.pairs, dealt.tiles, dealt.total,
           *(t.stride(0) for t in w.tensors), w.outputs, w.columns, w.blocks, each, SHARE=share, BLOCK_M=height, BLOCK_N=128, FORM=form,
           GATED=0, EARLY=False, STAGES=min(4, fits), X_LAYOUT=shared_layout((height, form.block), x.dtype), **launch_options(8, True))

def new(x, w, out, dealt, tile, share):
    pg.multiply_packed_groups(x, w, out, dealt, tile, share=share, gated=0, processors=132, pdl=True)

def clock(f, n=8):
    f(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        f()
    times = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); times.append(a.elapsed_time(b) * 1e3)
    return statistics.median(times)

up, down = weights(5760, 2880), weights(2880, 2880)
say("packed")
for rows in (4096, 2048, 1024, 320, 8192):
    x = torch.randn(rows, 2880, device=D).bfloat16()
    chosen = torch.rand(rows, E, device=D).argsort(1)[:, :K].int().contiguous()
    for name, w, xx, share in (("up", up, x, K), ("down", down, torch.randn(rows * K, 2880, device=D).bfloat16(), 1)):
        tile = pg.choose_packed_group_tile(rows * K, E, w, 227 << 10, hopper=True)
        dealt = pg.deal_pairs(chosen, None, tile.pairs, E, True)
        a, b = (torch.full((rows * K, w.outputs), float("nan"), device=D, dtype=torch.bfloat16) for _ in "ab")
        old(xx, w, a, dealt, tile, share); new(xx, w, b, dealt, tile, share)
        torch.cuda.synchronize()
        flops = 2 * rows * K * w.outputs * 2880
        times = [clock(lambda: f(xx, w, b, dealt, tile, share)) for f in (old, new, old, new)]
        kept = pg.gather_rows
        def only(): 
            g = xx.new_empty(rows * K, 2880)
            launch(kept, (count_parts(rows * K, 4), 3), xx, dealt.pairs, g, rows * K, len(xx), 2880, SHARE=share, BLOCK=1024, **launch_options(4, True))
        say(rows, name, "tile", tile.pairs, "same", torch.equal(a, b), "tiles", int(dealt.total), *(f"{t:.0f} us ({flops/t/1e6:.0f} TFLOP/s)" for t in times), f"gather {clock(only):.0f} us")
