import time
from itertools import cycle
import torch
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.descriptors import describe_blocks, launch_options
from adapters.models.kernels.cuda.tiles import Tile, count_parts
from adapters.models.kernels.triton_launch import launch
from benchmarks.candidates import wide
from benchmarks.candidates.launches import make_candidates
from benchmarks.prefill_kernels import measure_us, same_bits
dev = torch.device("cuda")
serving, cand = TritonKernels(dev), make_candidates(dev)
def raw(x, w, out, gated, cols, stages, group):
    n, depth = x.shape
    width = cols // 2 if gated else min(cols, 128)
    d = (describe_blocks(x, 64, 64), describe_blocks(w, cols, 64), describe_blocks(out, 64, width))
    programs = min(count_parts(n, 128) * count_parts(len(w), cols), 132)
    launch(wide.linear_wide_ahead, (programs,), *d, n, len(w), depth, **(launch_options(4, serving.pdl) | {"STAGES": stages, "GROUP": group, "GATED": gated}))
for name, columns, depth, gated in (("qkv", 6144, 4096, False), ("o", 4096, 4096, False), ("gate up", 24576, 4096, True), ("down", 4096, 12288, False), ("hyb down", 5120, 17408, False), ("hyb in", 16384, 5120, False)):
    rows = 1024
    count = 1 + (150 << 20) // (columns * depth * 2)
    ws = [torch.randn(columns, depth, device=dev).mul_(depth**-0.5).to(torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, depth, device=dev).to(torch.bfloat16)
    packed = [serving.pack_gated(w) if gated else serving.pack(w) for w in ws]
    want = serving.linear(x, packed[0])
    ops = 2 * rows * columns * depth
    out = torch.empty_like(want)
    def show(tag, got, us): print(f"{name} {tag} same={same_bits(got, want)} {us:.1f} us {ops/us/1e6:.0f} TFLOP/s", flush=True)
    def timed(f, args):
        c = cycle(args)
        return measure_us(lambda: f(next(c)), 15)
    show("serving", want, timed(lambda w: serving.linear(x, w), packed))
    if not gated: show("torch", x @ ws[0].T, timed(lambda w: x @ w.T, ws))
    else:
        y = (x @ packed[0].weight.T); print(name, "torch rows", timed(lambda w: x @ w.T, ws), flush=True)
    try: show("candidate", cand.linear(x, packed[0]), timed(lambda w: cand.linear(x, w), packed))
    except Exception as e: print(name, "candidate FAILED", repr(e)[:200], flush=True)
    for cols, stages, group in ((256, 4, 8), (256, 3, 8), (256, 4, 4), (256, 4, 2), (256, 4, 16), (128, 6, 8)):
        try:
            out.fill_(float("nan")); raw(x, packed[0].weight, out, gated, cols, stages, group); torch.cuda.synchronize(); got = out.clone()
            show(f"raw {cols} {stages} {group}", got, timed(lambda w: raw(x, w.weight, out, gated, cols, stages, group), packed))
        except Exception as e: print(name, cols, stages, group, "FAILED", repr(e)[:200], flush=True)
