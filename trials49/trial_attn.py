import sys, time, statistics
import torch
from adapters.models.kernels.cuda.attention import CHAIN_AHEAD, LOG2_E, SPLIT
from adapters.models.kernels.cuda.descriptors import cache_sizes, describe_blocks, launch_options, page_size
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.step_tiles import TileKind
from adapters.models.kernels.cuda.tiles import KV_TILE
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton.hopper import hopper_chain
from benchmarks.candidates import chain_deep, chain_memory, chain_overlapped
from benchmarks.prefill_kernels import measure_us, same_bits
from effects.ids import PAGE
dev = torch.device("cuda")
K = {"serving": hopper_chain.attend_chain_ahead, "overlap": chain_overlapped.attend_chain_overlapped, "memory": chain_memory.attend_chain_memory, "deep": chain_deep.attend_chain_deep}
def attend(kern, opts, kernels, q, kc, vc, batch, out):
    _, heads, head = q.shape
    slots, kv, cap = cache_sizes(kc, batch)
    o = CHAIN_AHEAD[head] | opts
    c = o["CONSUMERS"]
    tiles = kernels._attention.planner.find_tiles(batch, TileKind(c * (64 // (heads // kv))), slots)
    from adapters.models.kernels.triton_launch import launch
    launch(K[kern], (len(tiles) * kv,), q, *(describe_blocks(x.view(-1, head), KV_TILE, head) for x in (kc, vc)), tiles, out,
        batch.pages, cap, len(tiles), head**-0.5 * LOG2_E, HEADS=heads, KV=kv, GROUP=heads // kv, SPLIT=SPLIT, **o,
        PAGE=page_size(kc, batch), enable_fp_fusion=False, **launch_options(4 if c == 2 else 8, kernels.pdl))
V = {128: [("serving", {}), ("overlap", {}), ("deep", {}), ("memory", {}), ("deep", {"K_STAGES": 3, "V_STAGES": 3}), ("deep", {"K_STAGES": 2, "V_STAGES": 2}), ("overlap", {"K_STAGES": 2, "V_STAGES": 2}), ("overlap", {"K_STAGES": 5, "V_STAGES": 5}), ("overlap", {"REGISTERS": 232})],
     256: [("serving", {}), ("overlap", {}), ("deep", {}), ("memory", {})]}
for heads, kv, head in ((32, 8, 128), (24, 4, 256)):
    for behind in (31744, 7168, 0):
        rows = 1024
        torch.manual_seed(0)
        pages = -(-(behind + rows) // PAGE)
        table = torch.randperm(pages, device=dev).to(torch.int32).view(1, -1)
        kc, vc = (torch.randn(pages, kv, PAGE, head, device=dev).to(torch.bfloat16) for _ in range(2))
        q = torch.randn(rows, heads, head, device=dev).to(torch.bfloat16)
        ops = 4 * heads * head * rows * (behind + (rows + 1) / 2)
        kernels = TritonKernels(dev)
        batch = Batch(rows, dev, pages=table)
        batch.load(Step((Segment(0, behind, rows),), rows), [0] * rows)
        kernels.prepare_step(batch)
        want = None
        for name, opts in V[head]:
            if opts and behind == 0: continue
            out = torch.full_like(q, float("nan"))
            t = time.time()
            try:
                attend(name, opts, kernels, q, kc, vc, batch, out); torch.cuda.synchronize()
            except Exception as e:
                print(head, behind, name, opts, "FAILED", repr(e)[:200], flush=True); continue
            first = time.time() - t
            if want is None: want = out.clone()
            us = measure_us(lambda: attend(name, opts, kernels, q, kc, vc, batch, out), 15)
            print(f"{head} {behind} {name} {opts} same={same_bits(out, want)} {us:.1f} us {ops/us/1e6:.0f} TFLOP/s  (first {first:.1f} s)", flush=True)
