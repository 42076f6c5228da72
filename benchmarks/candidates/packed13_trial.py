import gc, sys, time
from functools import partial
import torch
from attrs import evolve
from torch.profiler import ProfilerActivity, profile
from adapters.models.kernels.cuda import attention, packed, packed_ahead
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.packed_ahead import AheadTile
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton import packed_single
from adapters.models.kernels.triton_launch import launch
from benchmarks import packed_kernels as pk
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth, seconds
T0 = time.time()
FOUND = []
what, names = sys.argv[1], sys.argv[2:]
def say(*a): print(f"[{time.time()-T0:5.1f}]", *a, flush=True)
ROW = packed_ahead.multiply_row
AHEADC = packed_ahead.choose_ahead_tile
PROCESSORS, SHARED = 132, 227 << 10
def single(x, weight, out, tile, *, gated, pdl):
    form = weight.block_form
    each, ahead = weight.piece // form.block, tile.columns // form.block
    count = count_parts(each, ahead) * ahead
    constants = {"PIECES": weight.pieces, "BLOCK_N": tile.outputs, "AHEAD": ahead, "COUNT": count, "ROOM": round_up_to_power(count), "FORM": form, "GATED": gated}
    options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
    launch(packed_single.packed_single, (count_parts(weight.outputs, tile.outputs),), *weight.tensors, x, out, weight.outputs, weight.columns, weight.blocks, each, **constants, **options)
packed_ahead.multiply_row = lambda x, w, out, tile, *, gated, pdl: (single if tile.stages == -1 else ROW)(x, w, out, tile, gated=gated, pdl=pdl)
S = lambda outputs, columns, warps, registers: lambda w: AheadTile(outputs, columns, -1, warps, registers)
def R(outputs, columns, warps, registers, most=3):
    def choose(w):
        packed_ahead._MOST_PROGRAMS = most
        found = packed_ahead.fill_memory(AheadTile(outputs, columns, 0, warps, registers), w, PROCESSORS, SHARED)
        packed_ahead._MOST_PROGRAMS = 3
        return found
    return choose
PIECES = {"r128": R(16, 128, 8, 80), "r256": R(16, 256, 8, 80), "r32": R(32, 128, 16, 64, 1), "s256/80": S(16, 256, 8, 80), "s256/128": S(16, 256, 8, 128), "s512/128": S(16, 512, 8, 128)}
CHAIN = {"c64x256": R(64, 256, 4, 128), "c64x512": R(64, 512, 4, 128), "c64x128": R(64, 128, 4, 128), "c128x256": R(128, 256, 8, 80, 2), "c32x512": R(32, 512, 2, 128, 6)}
AHEADS = {"a64x512": AheadTile(64, 512, 2, 4, 128), "a128x256": AheadTile(128, 256, 3, 8, 80), "a64x256x4": AheadTile(64, 256, 4, 4, 128)}
NONE = lambda w: None
PLAN = {}
def key_of(w): return {(6144, 4096): "qkv", (4096, 4096): "o", (4096, 12288): "down", (24576, 4096): "gate"}.get((w.outputs, w.columns), "head")
def choose(w, dtype, processors, shared):
    name = PLAN.get(key_of(w))
    return (PIECES | CHAIN)[name](w) if name and w.piece % 512 == 0 and dtype == DTYPE else None
packed_ahead.choose_row_tile = choose
packed_ahead.choose_ahead_tile = lambda w: AHEADS[PLAN["gate_ahead"]] if "gate_ahead" in PLAN and key_of(w) == "gate" else AHEADC(w)
def plan(**k):
    PLAN.clear(); PLAN.update(k)
def variants(shape): return CHAIN if shape == "gate_up" else PIECES
def differ(a, b): return int((a.view(torch.int16) != b.view(torch.int16)).sum())
def bits():
    kernels = pk.kernels_of()
    for name in names:
        bad = {}
        for shape in ("o", "down", "gate_up"):
            outputs, columns = pk.SHAPES[shape]; gated = shape == "gate_up"
            stack = pk.matrices(name, outputs, columns, gated=gated)
            w = kernels.pack_gated(stack) if gated else kernels.pack(stack)
            x = torch.randn(128, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(DTYPE)
            multiply = lambda x: kernels._packing.multiply(x, w, kernels.products.multiply)
            plan(); full = multiply(x).clone()
            for label, made in variants(shape).items():
                tile = made(w.parts[0])
                if tile is None: bad[shape, label] = "-"; continue
                for r in (0, 7, 40, 127):
                    out = torch.full_like(full[:1], float("nan"))
                    packed_ahead.multiply_row(x[r:r+1], w.parts[0], out, tile, gated=int(w.gated), pdl=kernels.pdl)
                    bad[shape, label] = bad.get((shape, label), 0) + differ(out, full[r:r+1])
            for count in (1, 4, 16, 64): bad[shape, count] = differ(multiply(x[7:][:count]), full[7:][:count])
        say("BITS", name, "bad", {str(k): v for k, v in bad.items() if v})
def kern(part, parts):
    kernels = pk.kernels_of(); jobs = []
    for name in names:
        for shape in ("o", "down", "gate_up"):
            outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
            w = pk.packed(kernels, pk.matrices(name, outputs, columns, gated=gated), gated=gated)
            x = torch.randn(1, columns, device=DEVICE).to(DTYPE); out = x.new_empty(1, outputs // (1 + gated))
            for made in variants(shape).values():
                if tile := made(w): jobs.append(partial(packed_ahead.multiply_row, x, w, out, tile, gated=int(gated), pdl=kernels.pdl))
    for job in jobs[part::parts]: job()
    torch.cuda.synchronize(); say("compiled", len(jobs[part::parts]))
def narrow():
    kernels = pk.kernels_of(); speed = max(bandwidth().values())
    for name in names:
        for shape in ("qkv", "o", "down", "gate_up"):
            outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
            ws = pk.copies(pk.packed(kernels, pk.matrices(name, outputs, columns, gated=gated), gated=gated))
            x = torch.randn(1, columns, device=DEVICE).to(DTYPE); out = x.new_empty(1, outputs // (1 + gated))
            found = {"bytes": pk.size_of(ws[0]) / speed * 1e6}
            plan(); found["main"] = 1e6 * pk.seconds_each([partial(pk.multiply, kernels, "served", x, w, out, gated=gated) for w in ws], 3)
            for label, made in variants(shape).items():
                tile = made(ws[0])
                if tile: found[f"{label}x{tile.stages}"] = 1e6 * pk.seconds_each([partial(packed_ahead.multiply_row, x, w, out, tile, gated=int(gated), pdl=kernels.pdl) for w in ws], 3)
            say("alone", name, shape, " ".join(f"{k} {v:.2f}" for k, v in found.items()))
FORM_OF, MOVED = packed.CudaPackedMatrix.block_form.fget, []
def form_with(w):
    form = FORM_OF(w)
    return evolve(form, converts=2) if MOVED and form.steps == "e4m3" else form
packed.CudaPackedMatrix.block_form = property(form_with)
ATTEND = dict(attention.AHEAD[128])
def model(layers=36, warm=False):
    from adapters.models.decoder.dense_shard import DenseShard
    from adapters.models.decoder.shard import ShardPlacement
    from adapters.models.kernels.cuda.kernels import TritonKernels
    from adapters.models.kernels.step import Segment, Step
    from adapters.models.numerics.synthetic import RandomWeights
    from benchmarks.cuda_model import buckets_are_exact, config_8b, decode
    from benchmarks.cuda_packed import laid_out
    speed = 1 if warm else max(bandwidth().values())
    for name in names:
        config = config_8b(layers, 9216)
        weights = RandomWeights(config, 0, DEVICE, DTYPE, layouts=laid_out(config, name))
        kernels = TritonKernels(DEVICE)
        shard = DenseShard(config, weights, kernels, ShardPlacement(device=DEVICE, dtype=DTYPE, slots=1, capacity=9216, buckets=(1, 4, 16, 64, 256)))
        say(name, "loaded")
        size = shard.memory()["weights"] - config.vocab_size * config.hidden_size * 2 + 2048 * config.kv_bytes_per_token(DTYPE)
        first = []
        def measure(label, processors=132, stages=(4, 3), **k):
            plan(**k)
            kernels._attention.processors = processors
            attention.AHEAD[128] = {"K_STAGES": stages[0], "V_STAGES": stages[1]}
            kernels.graphs._graphs.clear()
            for _ in range(2):
                got = shard.forward(Step((Segment(0, 1500, 1),), 1), torch.arange(100, 101, device=DEVICE)).hidden[:1].clone().view(torch.int16)
            first.append(got)
            took = min(decode(shard, 2048, 6 if warm else 24, fetch=False, bucket=1) for _ in range(1 if warm else 4))
            say("decode", name, f"{took*1e3:.3f} ms, {size/speed/took:.3f}, bits {torch.equal(got, first[0])}: {label} {dict(k)}")
            return took
        def shown(label):
            for _ in range(2): decode(shard, 2048, 4, fetch=False, bucket=1)
            with profile(activities=[ProfilerActivity.CUDA]) as prof: decode(shard, 2048, 4, fetch=False, bucket=1)
            events = [e for e in sorted(prof.events(), key=lambda e: e.time_range.end) if e.device_type == torch.autograd.DeviceType.CUDA]
            events = events[len(events) // 2:]
            ends, before, order = {}, None, 0
            for e in events:
                if e.name.startswith("rotate"): order = 0
                n = e.name[:24] if before is None or order > 12 else f"{order}:{e.name[:20]}"
                if before is not None: ends.setdefault(n, []).append(e.time_range.end - before)
                before, order = e.time_range.end, order + 1
            say("end to end", name, label, " ".join(f"{n} {sorted(d)[len(d)//2]:.2f}x{len(d)}" for n, d in ends.items() if len(d) > 2))
        measure("main")
        if name == "bf16":
            for label, more in (("132 programs", dict(processors=66)), ("2/2", dict(stages=(2, 2))), ("3/2", dict(stages=(3, 2)))): measure("attention " + label, **more)
            measure("main"); shown("main")
        elif warm:
            for p in PIECES if name in ("q4_k", "fp8") else ("r128", "r256", "s256/80"): measure(p, qkv=p, o=p, down=p)
            for p in CHAIN if name in ("q4_k", "fp8") else ("c64x256", "c64x512", "c64x128"): measure(p, gate=p, head=p)
            for st in ((4, 4), (3, 2), (2, 2)): measure("attention", stages=st)
            if name == "fp8":
                MOVED.append(1)
                for p in ("r128", "r256"): measure("bits moved, numbers are wrong", qkv=p, o=p, down=p, gate="c64x256")
                MOVED.clear()
            buckets_are_exact(shard, (1, 4, 16, 64, 256))
        else:
            shown("main")
            best, best_took, took_of = {}, measure("main"), {}
            def tried(**k):
                nonlocal best, best_took
                took = measure("", **best | k)
                if took < best_took: best, best_took = best | k, took
                return took
            if name in ("q4_k", "fp8"):
                for p in PIECES: took_of[p] = measure("", qkv=p, o=p, down=p)
                order = sorted(took_of, key=took_of.get)
                tried(qkv=order[0], o=order[0], down=order[0])
                for shape in ("qkv", "o", "down"):
                    for p in order[1:4]: tried(**{shape: p})
                chain = {p: tried(gate=p) for p in CHAIN}
                tried(gate=None, gate_ahead="a64x256x4")
                for p in sorted(chain, key=chain.get)[:2] if name == "q4_k" else (): tried(head=p)
                FOUND[:] = [best, best | {"gate": sorted(chain, key=chain.get)[0]}, best | {"gate": sorted(chain, key=chain.get)[1]}, dict(qkv=order[1], o=order[1], down=order[1], gate=best.get("gate"))]
            else:
                for k in FOUND: tried(**k)
                if name == "q8_0": tried(head="c64x256")
            say("BEST", name, best, f"{best_took*1e3:.3f} ms {size/speed/best_took:.3f}")
            for label, more in (("132 programs", dict(processors=66)), ("4/4 132 programs", dict(processors=66, stages=(4, 4))), ("2/2", dict(stages=(2, 2))), ("2/2 132", dict(processors=66, stages=(2, 2)))) if name in ("q4_k", "fp8") else (): measure("attention " + label, **more, **best)
            measure("best", **best); shown("best")
            if name == "fp8":
                MOVED.append(1)
                for p in ("r128", "r256"): measure("bits moved, numbers are wrong", qkv=p, o=p, down=p, gate="c64x256")
                MOVED.clear()
                for p in ("r128", "r256"): measure("the same as it is", qkv=p, o=p, down=p, gate="c64x256")
                plan(**best)
            kernels.graphs._graphs.clear(); say("exact", name, buckets_are_exact(shard, (1, 4, 16, 64, 256)))
        kernels._attention.processors = 132; attention.AHEAD[128] = dict(ATTEND)
        shard.close(); del shard, weights, kernels; gc.collect(); torch.cuda.empty_cache()
action, _, share = what.partition(":")
numbers = map(int, share.split("/")) if share else ()
{"bits": bits, "narrow": narrow, "kern": kern, "decode": model, "warm": partial(model, 2, True)}[action](*numbers)
