import gc, sys, itertools, time
from functools import partial
import torch
from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.cuda import packed, packed_ahead, packed_single as single
from adapters.models.kernels.cuda.packed_single import SingleTile
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.numerics.synthetic import random_matrix
from benchmarks import packed_kernels as pk
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth, seconds
T0 = time.time()
what, names = sys.argv[1], sys.argv[2:]
def say(*a): print(f"[{time.time()-T0:5.1f}]", *a, flush=True)
def setting(wide=0, rows=None, way="beside"):
    """wide: 0: none, 1: chains, 2: all, or a predicate."""
    fn = {"beside": BESIDE, "registers": REG}[way]
    packed.is_unpacked_beside = wide if callable(wide) else lambda n, w, d: wide > (w.pieces > 1)
    packed.multiply_beside = lambda x, w, out, *, gated, pdl: fn(x, w, out, gated=gated, pdl=pdl)
    packed_ahead.choose_wide_rows = (lambda n, in_pieces: min(rows, 128 if in_pieces else 256)) if rows else CHOOSE
BESIDE = packed_ahead.multiply_beside
REG = packed_ahead.multiply_wide_ahead
CHOOSE = packed_ahead.choose_wide_rows
def linear(kernels, x, stack): return kernels.linear(x, stack)
NONE = lambda w, d: None
CHOICE = single.choose_single_tile
def choose(fn): packed.choose_single_tile = fn
def differ(a, b): return int((a.view(torch.int16) != b.view(torch.int16)).sum())
def bits(kind):
    kernels = pk.kernels_of()
    def multiply(x, w): return kernels._packing.multiply(x, w, kernels.products.multiply)
    for name in names:
        bad = {}
        shapes = ((4096, 4096, 0), (1664, 1280, 0), (24576, 1024, 1), (16640, 1280, 1)) if kind == "wide" else ((4096, 4096, 0), (1664, 4352, 0), (4096, 12288, 0), (24576, 4096, 1))
        for outputs, columns, gated in shapes:
            stack = pk.matrices(name, outputs, columns, gated=bool(gated))
            w = kernels.pack_gated(stack) if gated else kernels.pack(stack)
            x = torch.randn(1100 if kind == "wide" else 128, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(DTYPE)
            choose(NONE); setting(0); full = multiply(x, w).clone()
            if kind == "wide":
                for first, count in ((7, 65), (7, 128), (7, 200), (0, 256), (7, 300), (0, 1024), (0, 1100)):
                    for way, rows in itertools.product(("beside", "registers"), (64, 128, 256)):
                        setting(2, rows, way=way); got = multiply(x[first:][:count], w)
                        bad[way, rows] = bad.get((way, rows), 0) + differ(got, full[first:][:count])
            else:
                pieces = w.parts[0].pieces > 1
                for tile in CHAINS if not pieces else SINGLES[:1] if columns == 4352 else SINGLES:
                    choose(lambda w, d: tile)
                    for r in (0, 7, 40):
                        bad[tile] = bad.get(tile, 0) + differ(multiply(x[r:r+1], w), full[r:r+1])
                choose(NONE)
                for count in (1, 4):
                    bad["main", count] = bad.get(("main", count), 0) + differ(multiply(x[7:][:count], w), full[7:][:count])
        say("BITS", name, {str(k): v for k, v in bad.items()})
SINGLES = [SingleTile(16, 256, 8, 80), SingleTile(16, 256, 8, 128), SingleTile(16, 512, 8, 128), SingleTile(16, 128, 8, 64)]
from adapters.models.kernels.cuda.packed_ahead import AheadTile
AHEADS = [AheadTile(64, 512, 2, 4, 128), AheadTile(128, 256, 3, 8, 80), AheadTile(64, 256, 3, 4, 96), AheadTile(64, 256, 3, 4, 80), AheadTile(64, 512, 2, 4, 96)]
AHEAD_CHOICE = packed_ahead.choose_ahead_tile
CHAINS = [SingleTile(64, 256, 4, 168), SingleTile(16, 512, 1, 168)]
KEPT, LEFT, BUCKETS = [], [], (1, 4, 16, 64, 256, 1024)
def narrow():
    kernels = pk.kernels_of()
    speed = max(bandwidth().values())
    for cached in (False, True):
        for name in names:
            for shape in ("qkv", "o", "down", "gate_up"):
                outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
                ws = pk.copies(pk.packed(kernels, pk.matrices(name, outputs, columns, gated=gated), gated=gated), cached=cached)
                x = torch.randn(1, columns, device=DEVICE).to(DTYPE); out = x.new_empty(1, outputs // (1 + gated))
                found = {"bytes": pk.size_of(ws[0]) / speed * 1e6}
                for label in (("registers",) if shape != "gate_up" else ("registers", "ahead")):
                    found[label] = 1e6 * pk.seconds_each([partial(pk.multiply, kernels, label, x, w, out, gated=gated) for w in ws])
                for t in CHAINS if shape == "gate_up" else SINGLES:
                    found[f"{t.outputs}x{t.ahead}x{t.warps}+{t.registers}"] = 1e6 * pk.seconds_each([partial(single.multiply_single, x, w, out, t, gated=int(gated), pdl=kernels.pdl) for w in ws])
                for t in AHEADS if shape == "gate_up" else ():
                    packed_ahead.choose_ahead_tile = lambda w: t
                    found[f"ahead {t.outputs}x{t.columns}x{t.stages}+{t.registers}"] = 1e6 * pk.seconds_each([partial(packed_ahead.multiply_ahead, x, w, out, gated=int(gated), pdl=kernels.pdl) for w in ws])
                packed_ahead.choose_ahead_tile = AHEAD_CHOICE
                say("cached" if cached else "memory", name, shape, " ".join(f"{k} {v:.2f}" for k, v in found.items()))
def kern(part, parts):
    """Compile part of the kernels."""
    kernels = pk.kernels_of(); jobs = []
    for name in names:
        for shape in ("qkv", "o", "down", "gate_up"):
            outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
            w = pk.packed(kernels, pk.matrices(name, outputs, columns, gated=gated), gated=gated)
            x = torch.randn(1, columns, device=DEVICE).to(DTYPE); out = x.new_empty(1, outputs // (1 + gated))
            for t in CHAINS if gated else SINGLES if shape != "qkv" else ():
                jobs.append(partial(single.multiply_single, x, w, out, t, gated=int(gated), pdl=kernels.pdl))
            for t in AHEADS if gated else ():
                jobs.append(partial(ahead_with, t, x, w, out, int(gated), kernels.pdl))
            jobs.append(partial(pk.multiply, kernels, "registers", x, w, out, gated=gated))
            if shape == "o": continue
    for job in jobs[part::parts]: job()
    torch.cuda.synchronize(); say("compiled", len(jobs[part::parts]))
def ahead_with(t, x, w, out, gated, pdl):
    packed_ahead.choose_ahead_tile = lambda _: t
    packed_ahead.multiply_ahead(x, w, out, gated=gated, pdl=pdl)
    packed_ahead.choose_ahead_tile = AHEAD_CHOICE
def widekern(part, parts):
    kernels = pk.kernels_of(); jobs = []
    for name in names:
        for shape in ("o", "gate_up"):
            outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
            w = pk.packed(kernels, pk.matrices(name, outputs, columns, gated=gated), gated=gated)
            x = torch.randn(256, columns, device=DEVICE).to(DTYPE); out = x.new_empty(256, outputs // (1 + gated))
            for way, rows in itertools.product((BESIDE, REG), (64, 128, 256)):
                if rows < 256 or w.pieces == 1: jobs.append((way, rows, x, w, out, int(gated)))
    for way, rows, x, w, out, gated in jobs[part::parts]:
        setting(0, rows); way(x, w, out, gated=gated, pdl=kernels.pdl)
    torch.cuda.synchronize(); say("compiled", len(jobs[part::parts]))
def wide(counts=(64, 128, 256, 512, 1024, 2048)):
    kernels = pk.kernels_of(); pk.PRODUCTS = 24; choose(NONE)
    for name in names:
        for shape in ("qkv", "o", "down", "gate_up"):
            outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
            stack = pk.matrices(name, outputs, columns, gated=gated)
            w = kernels.pack_gated(stack) if gated else kernels.pack(stack)
            plain = stack.unpack(); p = kernels.pack_gated(plain) if gated else kernels.pack(plain)
            for count in counts:
                x = torch.randn(count, columns, device=DEVICE).to(DTYPE); out = x.new_empty(count, outputs // (1 + gated))
                part = w.parts[0]
                took = lambda body, n=8: 1e6 * pk.seconds_each([body] * n, 3)
                found = {"bf16": took(partial(kernels.products.multiply, x, p.weight, out, gated=int(gated)))}
                setting(0); found["main"] = took(partial(kernels._packing.multiply, x, w, kernels.products.multiply))
                for way, rows in itertools.product(("beside", "registers"), (64, 128, 256)):
                    if rows > max(64, count) or (rows > 128 and part.pieces > 1) or (rows == 64 and count > 256): continue
                    setting(2, rows)
                    found[f"{way[0]}{rows}"] = took(partial(BESIDE if way == "beside" else REG, x, part, out, gated=int(gated), pdl=kernels.pdl))
                say("wide", name, shape, count, " ".join(f"{k} {v:.1f}" for k, v in found.items()))
def model(layers=36, warm=False, kind="decode"):
    from torch.profiler import ProfilerActivity, profile
    from adapters.models.decoder.dense_shard import DenseShard
    from adapters.models.decoder.shard import ShardPlacement
    from adapters.models.kernels.step import Segment, Step
    from adapters.models.numerics.synthetic import RandomWeights
    from benchmarks.cuda_model import buckets_are_exact, config_8b, decode, prefill
    from benchmarks.cuda_packed import laid_out
    speed = 1 if warm else max(bandwidth().values())
    for name in names:
        config = config_8b(layers, 9216)
        weights = RandomWeights(config, 0, DEVICE, DTYPE, layouts=laid_out(config, name))
        kernels = TritonKernels(DEVICE)
        shard = DenseShard(config, weights, kernels, ShardPlacement(device=DEVICE, dtype=DTYPE, slots=1, capacity=9216, buckets=(1, 4, 16, 64, 256, 1024, 2048)))
        say(name, "loaded")
        size = shard.memory()["weights"] - config.vocab_size * config.hidden_size * 2 + 2048 * config.kv_bytes_per_token(DTYPE)
        expected = []
        tokens = torch.randint(0, 1000, (8192,), device=DEVICE)
        for label, k in () if kind == "decode" else ((("main", dict(wide=0)), ("beside", dict(wide=2)), ("chains beside", dict(wide=1)), ("registers", dict(wide=2, way="registers")), ("chains registers", dict(wide=1, way="registers")))[:1 if warm else 9] if name != "bf16" else (("bf16", dict(wide=0)),)):
            setting(**k)
            for chunk in (1024, 2048):
                kernels.graphs._graphs.clear()
                prefill(shard, tokens, chunk)
                took = min(seconds(partial(prefill, shard, tokens, chunk)) for _ in range(2 if warm else 3))
                rows = torch.cat([p.reshape(-1)[:1 << 16] for p in shard.rows.export(0, 8000, 8064).values()]).clone()
                expected.append(rows)
                say("prefill", name, label, chunk, f"{took*1e3:.2f} ms", "bits", torch.equal(expected[0].view(torch.int16), rows.view(torch.int16)))
        bits = []
        if kind == "prefill":
            shard.close(); del shard, weights, kernels; gc.collect(); torch.cuda.empty_cache()
            continue
        def measure(label, pieces, chain, bucket=1):
            choose(lambda w, d: (chain if w.outputs == 24576 else None) if w.pieces == 1 else pieces(w))
            kernels.graphs._graphs.clear()
            for _ in range(3):
                got = shard.forward(Step((Segment(0, 1500, 1),), bucket), torch.arange(100, 101, device=DEVICE)).hidden[:1].clone().view(torch.int16)
            bits.append(got)
            took = min(decode(shard, 2048, 8 if warm else 40, fetch=False, bucket=bucket) for _ in range(1 if warm else 4))
            say("decode", name, f"{took*1e3:.3f} ms, {size/speed/took:.3f} of the limit", torch.equal(got, bits[0]), label)
            return took
        if name == "bf16":
            measure("bf16", lambda w: None, None)
        else:
            no = lambda w: None
            big = lambda w: w.outputs > 4096
            P = {"all 80/256": lambda w: SINGLES[0], "qkv 80/256, others 128/256": lambda w: SINGLES[0] if big(w) else SINGLES[1], "qkv 80/256, others 128/512": lambda w: SINGLES[0] if big(w) else SINGLES[2], "qkv o 80/256, down 128/512": lambda w: SINGLES[0] if w.piece <= 512 else SINGLES[2], "o 64/128, others 80/256": lambda w: SINGLES[0] if big(w) or w.piece > 512 else SINGLES[3], "all 64/128": lambda w: SINGLES[3]}
            measure("main", no, None)
            if warm:
                setting(2); say("exact", buckets_are_exact(shard, BUCKETS)); continue
            full = name in ("q4_k", "fp8")
            timed = {k: measure(k, p, None) for k, p in P.items() if full or k in KEPT}
            KEPT[:] = sorted(timed, key=timed.get)[:3]
            best_name = KEPT[0]
            ahead = {}
            for t in AHEADS if full else LEFT:
                packed_ahead.choose_ahead_tile = lambda w: t if w.outputs == 24576 else AHEAD_CHOICE(w)
                ahead[t] = measure(f"{best_name}, {t}", P[best_name], None)
            LEFT[:] = sorted(ahead, key=ahead.get)[:2]
            fastest = LEFT[0]
            packed_ahead.choose_ahead_tile = lambda w: fastest if w.outputs == 24576 else AHEAD_CHOICE(w)
            if True:
                again = {k: measure(f"{k}, {fastest}", P[k], None) for k in KEPT}
                best_name = min(again, key=again.get)
            best = P[best_name]
            say("BEST", name, best_name, fastest)
            if full:
                chains = {str(c): measure(f"{best_name}, chain {c}", best, c) for c in CHAINS}
            choose(lambda w, d: None if w.pieces == 1 else best(w))
            setting(2); kernels.graphs._graphs.clear(); say("exact", name, buckets_are_exact(shard, BUCKETS))
        if not warm:
            for label in (("main", "best") if name in ("q4_k", "fp8") else ("bf16",) if name == "bf16" else ()):
                packed_ahead.choose_ahead_tile = AHEAD_CHOICE if label != "best" else lambda w: fastest if w.outputs == 24576 else AHEAD_CHOICE(w)
                if label == "main": choose(NONE)
                elif name != "bf16": choose(lambda w, d: None if w.pieces == 1 else best(w))
                kernels.graphs._graphs.clear()
                for _ in range(2): decode(shard, 2048, 4, fetch=False, bucket=1)
                with profile(activities=[ProfilerActivity.CUDA]) as prof:
                    decode(shard, 2048, 4, fetch=False, bucket=1)
                events = [e for e in sorted(prof.events(), key=lambda e: e.time_range.start) if e.device_type == torch.autograd.DeviceType.CUDA]
                events = events[len(events) * 3 // 4:]
                names_ = [e.name[:22] for e in events]
                deltas, before = {}, None
                period = 8
                firsts = [i for i, n in enumerate(names_) if n.startswith("attend")]
                for i, e in enumerate(events):
                    end = e.time_range.end
                    if before is not None and firsts and firsts[2] <= i < firsts[-2]:
                        deltas.setdefault(((i - firsts[2]) % period, names_[i]), []).append(end - before)
                    before = end
                say("from end to end", name, label, " ".join(f"{n} {sum(d)/len(d):.2f}" for (k, n), d in sorted(deltas.items())))
        shard.close(); del shard, weights, kernels; packed_ahead.choose_ahead_tile = AHEAD_CHOICE; gc.collect(); torch.cuda.empty_cache()
action, _, share = what.partition(":")
numbers = map(int, share.split("/")) if share else ()
{"bits-wide": partial(bits, "wide"), "bits-single": partial(bits, "single"), "narrow": narrow, "wide": wide, "kern": kern, "widekern": widekern, "decode": model, "decode-warm": partial(model, 2, True), "prefill": partial(model, 12, False, "prefill"), "prefill-warm": partial(model, 2, True, "prefill")}[action](*numbers)
