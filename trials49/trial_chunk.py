import sys, time
from collections import defaultdict
import torch
from torch.profiler import ProfilerActivity, profile
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.cuda_model import config_8b
from benchmarks.candidates.launches import make_candidates
dev = torch.device("cuda")
LAYERS = 36
config = config_8b(LAYERS, 33 * 1024)
t = time.time()
weights = RandomWeights(config, 0, dev, torch.bfloat16)
kernels = make_candidates(dev) if sys.argv[1] == "c" else TritonKernels(dev)
shard = DenseShard(config, weights, kernels, ShardPlacement(device=dev, dtype=torch.bfloat16, slots=1, capacity=33 * 1024, buckets=(4, 1024)))
print("built", round(time.time() - t, 1), flush=True)
tokens = torch.randint(0, 151936, (32768,), device=dev)
def chunk(start): shard.forward(Step((Segment(0, start, 1024),), 1024), tokens[start:start + 1024])
for i in range(3): chunk(0)
torch.cuda.synchronize(); print("warm", round(time.time() - t, 1), flush=True)
def whole(n):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for s in range(0, n, 1024): chunk(s)
    b.record(); b.synchronize()
    return a.elapsed_time(b)
for n in (2048, 8192, 32768):
    print(sys.argv[1], n, [round(whole(n), 1) for _ in range(4)], flush=True)
for start in (0, 31744):
    for _ in range(10): chunk(start)
    torch.cuda.synchronize()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(20): chunk(start)
    b.record(); b.synchronize(); print(sys.argv[1], "chunk at", start, round(a.elapsed_time(b) / 20, 2), "ms", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3): chunk(start)
        torch.cuda.synchronize()
    ev = sorted((e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    tot, num = defaultdict(float), defaultdict(int)
    end = ev[0].time_range.start
    idle = 0.0
    for e in ev:
        tot[e.name] += e.time_range.end - e.time_range.start; num[e.name] += 1
        idle += max(0, e.time_range.start - end); end = max(end, e.time_range.end)
    print("  span", round((end - ev[0].time_range.start) / 3, 1), "us a chunk, idle", round(idle / 3, 1))
    for k in sorted(tot, key=tot.get, reverse=True)[:14]: print(f"  {k[:60]:60s} {num[k] / 3:7.1f} x {tot[k] / num[k]:8.1f} us = {tot[k] / 3:9.1f}")
    L = [(e.name[:28], round(e.time_range.start - ev[0].time_range.start, 1), round(e.time_range.end - e.time_range.start, 1)) for e in ev[20:42]]
    for x in L: print("     ", x)
