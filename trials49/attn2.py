import os, sys, time
import torch
from trials49.common import *
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from benchmarks.prefill_kernels import measure_us, same_bits
from effects.ids import PAGE
def T(t, m, k=4, v=4): return ("turns", {"TURNS": t, "MODE": m, "K_STAGES": k, "V_STAGES": v})
def P(k, v): return ("pair", {"K_STAGES": k, "V_STAGES": v})
V = [(128, "serving", {}), (128, "overlap", {"K_STAGES": 5, "V_STAGES": 5}), (128, *P(4, 4)), (128, *P(5, 5)), (128, *T(2, 0)), (128, *T(0, 1)), (128, *T(0, 2)), (128, *T(0, 4)), (128, *T(0, 8)), (128, *T(0, 6)), (128, *T(0, 7)),
     (128, *T(1, 8)), (128, "deep", {"K_STAGES": 6, "V_STAGES": 2}), (256, "serving", {}), (256, *P(2, 2)), (256, *P(3, 2))]
only = os.environ.get("ONLY")
for heads, kv, head in ((32, 8, 128), (24, 4, 256)):
    for behind in ((31744, 7168, 0) if only is None else (0,)):
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
        for i, (of, name, opts) in enumerate(V):
            if of != head: continue
            if only is not None and i != int(only): continue
            if behind < 31744 and (opts.get("MODE") or name == "deep") and only is None: continue
            out = torch.full_like(q, float("nan"))
            t = time.time()
            go = lambda: attend(name, opts, kernels._attention.planner, kernels.pdl, q, kc, vc, batch, out)
            try: go(); torch.cuda.synchronize()
            except Exception as e: print(head, behind, name, opts, "FAILED", repr(e)[:200], flush=True); continue
            first = time.time() - t
            if only is not None: break
            if want is None: want = out.clone()
            us = measure_us(go, 12)
            print(f"{head} {behind} {name} {opts} same={same_bits(out, want)} {us:.1f} us {ops/us/1e6:.0f} TFLOP/s  (first {first:.1f} s)", flush=True)
