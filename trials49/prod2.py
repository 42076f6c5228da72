import sys, time
import torch
from trials49.common import *
serving = TritonKernels(dev)
sys.argv = ["whole", "ACE"]
import trials49.whole as whole
whole.shards.clear(); torch.cuda.empty_cache(); sys.stdout.flush()
V = {"serving": None, "torch": "t", "256 4 2": (256, 4, 2), "256 3 4": (256, 3, 4), "128 6 8": (128, 6, 8)}
def same(a, b): return torch.equal(a.view(torch.int16), b.view(torch.int16))
for name, columns, depth, gated in (("qkv", 6144, 4096, False), ("o", 4096, 4096, False), ("gate up", 24576, 4096, True), ("down", 4096, 12288, False)):
    rows = 1024
    count = 1 + (150 << 20) // (columns * depth * 2)
    ws = [torch.randn(columns, depth, device=dev).mul_(depth**-0.5).to(torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, depth, device=dev).to(torch.bfloat16)
    packed = [(serving.pack_gated(w) if gated else serving.pack(w)).weight for w in ws]
    ops = 2 * rows * columns * depth
    out = torch.empty(rows, columns // 2 if gated else columns, device=dev, dtype=torch.bfloat16)
    graphs, want = {}, None
    for tag, how in V.items():
        def one(w):
            if how is None: serving.products.multiply(x, w, out, gated=gated)
            elif how == "t": torch.mm(x, w.t(), out=out if not gated else wide_out)
            else: raw(x, w, out, gated, *how, serving.pdl)
        wide_out = torch.empty(rows, columns, device=dev, dtype=torch.bfloat16) if gated and how == "t" else None
        try:
            out.fill_(float("nan")); one(packed[0]); torch.cuda.synchronize()
        except Exception as e: print(name, tag, "FAILED", repr(e)[:150], flush=True); continue
        got = out.clone(); want = got if want is None else want
        st = torch.cuda.Stream(); g = torch.cuda.CUDAGraph()
        st.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(g, stream=st):
            for i in range(12): one(packed[i % count])
        graphs[tag] = (g, same(got, want))
    times = {t: [] for t in graphs}
    for r in range(2):
        for t, (g, ok) in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            n = max(1, int(0.12 / (12 * ops / 7e14)))
            g.replay(); a.record()
            for _ in range(n): g.replay()
            b.record(); b.synchronize(); times[t].append(a.elapsed_time(b) * 1000 / n / 12)
    print(name, {t: (graphs[t][1], *(round(u, 1) for u in us), round(ops / min(us) / 1e6)) for t, us in times.items()}, flush=True)
