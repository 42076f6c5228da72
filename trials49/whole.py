import sys, time
import torch
from trials49.common import *
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.cuda_model import config_8b
O = ("overlap", {"K_STAGES": 5, "V_STAGES": 5})
Tn = ("pair", {"K_STAGES": 5, "V_STAGES": 5})
C = {"A": (None, None), "B": (O, None), "F": (None, "torch"), "G": (None, "wide"), "C": (Tn, None), "D": (Tn, "torch"), "E": (Tn, "wide")}
names = sys.argv[1]
config = config_8b(36, 33 * 1024)
tokens = torch.randint(0, 151936, (32768,), device=dev, generator=torch.Generator(dev).manual_seed(1))
shards = {}
def chunk(shard, start): return shard.forward(Step((Segment(0, start, 1024),), 1024), tokens[start:start + 1024])
want = None
for n in names:
    weights = RandomWeights(config, 0, dev, torch.bfloat16)
    s = shards[n] = DenseShard(config, weights, make(*C[n]), ShardPlacement(device=dev, dtype=torch.bfloat16, slots=1, capacity=33 * 1024, buckets=(4, 1024)))
    for _ in range(3): h = chunk(s, 0).hidden.clone()
    for st in range(0, 8192, 1024): h = chunk(s, st).hidden.clone()
    want = h if want is None else want
    print(n, C[n], "same bits at 8192:", torch.equal(h.view(torch.int16), want.view(torch.int16)), flush=True)
def whole(s, n):
    torch.cuda.synchronize(); time.sleep(0.25)
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for st in range(0, n, 1024): chunk(s, st)
    b.record(); b.synchronize()
    return a.elapsed_time(b)
found = {}
for r in range(2):
    for n, s in shards.items():
        for k in (8192, 32768): found.setdefault((n, k), []).append(round(whole(s, k), 1))
for key, v in found.items(): print(*key, "median", statistics.median(v), v)
