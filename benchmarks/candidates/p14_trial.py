"""p14_trial.py ACTION FORMAT: times of variants of one-row products within a model of the 8B shape."""
import faulthandler, fcntl, re, sys, time
from functools import partial
import torch
from torch.profiler import ProfilerActivity, profile
from adapters.models.kernels.cuda import packed, packed_ahead
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.packed_ahead import AheadTile
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.triton.hopper import hopper_packed, hopper_row_registers
from adapters.models.kernels.triton_launch import launch
from benchmarks import packed_kernels as pk
from benchmarks.candidates import p14_kernels as kernels14
from benchmarks.cuda_model import DEVICE, DTYPE, bandwidth, seconds

T0 = time.time()
def say(*a): print(f"[{time.time()-T0:5.1f}]", *a, flush=True)
CHOOSE, MULTIPLY_AHEAD = packed_ahead.choose_row_tile, packed_ahead.multiply_ahead
PROCESSORS, SHARED = 132, 227 << 10
PLAN, COMING, NEXT, LAST = {}, {}, {}, [None]
CLOCKS = []
def key_of(w): return {(6144, 4096): "qkv", (4096, 4096): "o", (4096, 12288): "down", (24576, 4096): "gate"}.get((w.outputs, w.columns), "head")
def parse(spec):
    kind = spec[0]
    found = {k: int(v) for k, v in re.findall(r"([a-zA-Z])(\d+)", "R" + spec[1:])}
    return kind, found
def coming_of(weight):
    NEXT.setdefault(id(LAST[0]), weight); LAST[0] = weight
    asked = COMING.get(key_of(weight))
    other = NEXT.get(id(weight))
    if asked is None or other is None: return (weight.words, weight.levels, 0, 0, 0, 0, 0), 0
    units = len(other.words)
    return (other.words, other.levels, units, other.words.nbytes // units, other.levels.nbytes // units, *asked), 1
def run(spec, x, weight, out, *, gated, pdl):
    kind, p = parse(spec)
    form = weight.block_form
    coming, comes = coming_of(weight)
    if kind == "a":
        tile = AheadTile(p["R"], p["x"], p["k"], p["w"], p["g"])
        descriptors = (*packed_ahead._describe_weight(weight, tile), packed_ahead._describe_rows(x, weight.pieces, tile.columns))
        steps = count_parts(weight.blocks // weight.pieces, tile.columns // form.block)
        constants = {"W_STAGES": p["k"], "X_STAGES": p["X"], "FORM": form, "GATED": gated}
        options = launch_options(tile.warps, pdl) | {"maxnreg": tile.registers}
        launch(hopper_packed.packed_ahead, (count_parts(weight.outputs, tile.outputs), 1), *descriptors, out, len(x), weight.outputs, steps, out.stride(0), **constants, **options)
        return
    options = launch_options(p["w"], pdl) | {"maxnreg": p["g"]}
    grid = (count_parts(weight.outputs, p["R"]),)
    if kind in "sh":
        constants = {"EACH": weight.piece // form.block, "PIECES": weight.pieces, "BLOCK_N": p["R"], "AHEAD": p["x"] // form.block, "FORM": form, "GATED": gated}
        if kind == "h" and not comes:
            launch(hopper_row_registers.packed_row_registers, grid, *weight.tensors, x, out, weight.outputs, weight.blocks, **constants, **options)
            return
        constants |= {"COMING": comes, "OWN": p.get("o", 0)}
        launch(kernels14.single_trial, grid, *weight.tensors, x, out, weight.outputs, weight.blocks, *coming, **constants, **options)
        return
    tile = row_tile(spec, weight)
    clock = CLOCKS[-1] if CLOCKS and "c1" in spec else weight.words.view(-1)
    constants = {"STEPS": weight.piece // tile.columns, "COLUMNS": tile.columns, "STAGES": tile.stages, "FORM": form, "GATED": gated, "COMING": comes, "OWN": p.get("o", 0), "MODE": p.get("M", 0), "CLOCK": int("c1" in spec)}
    launch(kernels14.row_trial, grid, *packed_ahead._describe_weight(weight, tile), x, out, weight.outputs, *coming, clock, *weight.tensors, weight.blocks, **constants, **options)
def row_tile(spec, weight):
    _, p = parse(spec)
    old, packed_ahead._MOST_PROGRAMS = packed_ahead._MOST_PROGRAMS, p.get("m", 3)
    tile = packed_ahead.fill_memory(AheadTile(p["R"], p["x"], 2, p["w"], p["g"]), weight, PROCESSORS, SHARED)
    packed_ahead._MOST_PROGRAMS = old
    return tile
def choose(x, weight, processors, shared):
    spec = PLAN.get(key_of(weight))
    if len(x) != 1 or x.dtype != DTYPE: return None
    if spec == "none":
        LAST[0] = None
        return None
    if spec: return spec
    tile = CHOOSE(x, weight, processors, shared)
    if tile is None: LAST[0] = None
    return tile
MULTIPLY_ROW = packed_ahead.multiply_row
def multiply_row(x, weight, out, tile, *, gated, pdl):
    if isinstance(tile, str): return run(tile, x, weight, out, gated=gated, pdl=pdl)
    coming_of(weight)
    MULTIPLY_ROW(x, weight, out, tile, gated=gated, pdl=pdl)
packed_ahead.choose_row_tile = choose
packed_ahead.multiply_row = multiply_row
A4, R8 = dict(qkv="h16x256w8g128", o="h16x512w8g128", down="h16x256w8g128"), dict(qkv="r16x128w8g80", o="r16x128w8g80", down="r16x128w8g80")
GATES = {
    "q4_k": ["r64x512w4g168", "r64x512w4g168o4", "r64x512w4g168o2", "a64x256w4g128k6X2"],
    "awq": ["r64x512w4g168", "r64x512w4g168o4", "r64x512w4g168o2", "r64x256w4g168", "a64x512w4g168k3X2"],
    "q8_0": ["r64x256w4g168", "a64x256w4g168k3X3", "a64x256w4g168k3X2", "r64x128w4g128"],
    "fp8": ["r64x128w4g128", "r64x256w4g128", "r64x512w4g168"],
}
PIECES = {
    "q4_k": [dict(down="s16x256w8g128o4"), dict(down="s16x256w8g128o2"), dict(down="h32x256w16g128"), dict(o="h32x256w16g128"), dict(down="h16x512w8g128"), dict(down="r16x256w8g128"), dict(qkv="h16x512w8g128"), dict(o="h16x256w8g128")],
    "awq": [dict(down="s16x256w8g128o4"), dict(down="s16x256w8g128o2"), dict(down="h32x256w16g128"), dict(down="h16x512w8g128"), dict(down="r16x256w8g128"), dict(qkv="h16x512w8g128")],
    "q8_0": [dict(qkv="r16x256w8g168"), dict(down="r16x256w8g168"), dict(o="r16x256w8g168"), dict(down="r16x128w8g80o4")],
    "fp8": [dict(qkv="r16x256w8g80"), dict(down="r16x256w8g80")],
}
NEXTS = {"q4_k": [(96, 64), (96, 128), (0, 96)], "awq": [(96, 64), (96, 128), (0, 96)], "q8_0": [(56, 32), (56, 64), (56, 96), (0, 96)], "fp8": [(64, 32), (64, 64), (64, 96), (0, 96)]}
BASE = {"q4_k": A4, "awq": A4, "q8_0": R8, "fp8": R8}
NONE = dict(qkv="none", o="none", down="none", gate="none")
FINAL = {
    "q4_k": [NONE, dict(gate="none"), dict(gate="r64x512w4g168"), dict(qkv="h16x256w8g128")],
    "awq": [NONE, dict(qkv="h16x256w8g128"), dict(gate="none")],
    "q8_0": [dict(gate="none", down="r16x128w8g80"), dict(down="r16x128w8g80"), dict(gate="none")],
    "fp8": [dict(qkv="r16x256w8g80"), dict(gate="r64x256w4g128")],
}
def plan(**k):
    PLAN.clear(); PLAN.update({a: b for a, b in k.items() if b})
def run_coming(spec, x, w, out, pdl):
    COMING["o"] = (0, 96)
    run(spec, x, w, out, gated=0, pdl=pdl)
    COMING.clear()
def kern(name, part, parts):
    kernels = pk.kernels_of(); jobs = []
    for shape in ("o", "down", "gate_up"):
        outputs, columns = pk.SHAPES[shape]; gated = shape == pk.GATED
        w = pk.packed(kernels, pk.matrices(name, outputs, columns, gated=gated), gated=gated)
        x = torch.randn(1, columns, device=DEVICE).to(DTYPE); out = x.new_empty(1, outputs // (1 + gated))
        specs = GATES[name] if gated else sorted({s for d in (BASE[name], *PIECES[name]) for s in d.values()})
        if gated and name in ("awq", "q4_k", "q8_0"): specs = [*specs, *(GATES[name][0] + more for more in ("c1", "M1", "M2"))]
        for spec in specs: jobs.append((spec, partial(run, spec, x, w, out, gated=int(gated), pdl=kernels.pdl)))
        if shape == "o": NEXT[id(w)] = w; jobs.append((BASE[name]["o"], partial(run_coming, BASE[name]["o"], x, w, out, pdl=kernels.pdl)))
    for spec, job in jobs[part::parts]:
        try: job()
        except Exception as e: say("FAILED", spec, repr(e)[:200])
    torch.cuda.synchronize(); say("compiled", len(jobs[part::parts]))
def model(name, layers=36, warm=False):
    from adapters.models.decoder.dense_shard import DenseShard
    from adapters.models.decoder.shard import ShardPlacement
    from adapters.models.kernels.cuda.kernels import TritonKernels
    from adapters.models.kernels.step import Segment, Step
    from adapters.models.numerics.synthetic import RandomWeights
    from benchmarks.cuda_model import buckets_are_exact, config_8b, decode
    from benchmarks.cuda_packed import laid_out
    if not warm:
        lock = open("/tmp/p14.lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        faulthandler.dump_traceback_later(24, exit=True)
        global T0
        T0 = time.time()
    speed = 1 if warm else max(bandwidth().values())
    config = config_8b(layers, 9216)
    weights = RandomWeights(config, 0, DEVICE, DTYPE, layouts=laid_out(config, name))
    kernels = TritonKernels(DEVICE)
    shard = DenseShard(config, weights, kernels, ShardPlacement(device=DEVICE, dtype=DTYPE, slots=1, capacity=9216, buckets=(1, 4, 16, 64, 256)))
    say(name, "loaded")
    size = shard.memory()["weights"] - config.vocab_size * config.hidden_size * 2 + 2048 * config.kv_bytes_per_token(DTYPE)
    first = []
    def measure(label, coming=None, **k):
        plan(**k)
        COMING.clear(); COMING.update(coming or {})
        kernels.graphs._graphs.clear()
        try:
            for _ in range(2):
                got = shard.forward(Step((Segment(0, 1500, 1),), 1), torch.arange(100, 101, device=DEVICE)).hidden[:1].clone().view(torch.int16)
            first.append(got)
            took = min(decode(shard, 2048, 6 if warm else 16, fetch=False, bucket=1) for _ in range(1 if warm else 3))
        except Exception as e:
            say("FAILED", label, k, repr(e)[:200]); return 1.0
        say("decode", name, f"{took*1e3:.3f} ms, {size/speed/took:.3f}, bits {torch.equal(got, first[0])}: {label} {coming or ''} {dict(k)}")
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
    def clocked(spec, **k):
        CLOCKS.append(torch.zeros(384 * 8, dtype=torch.int64, device=DEVICE))
        measure("clock", **k | {"gate": spec})
        t = CLOCKS[-1].view(-1, 8).cpu()
        mid = lambda v: f"{v.float().median():.0f}/{v.float().max():.0f}"
        g = t[:, 1].min()
        say("clock", name, spec, f"cycles before wait {mid(t[:, 3])} row {mid(t[:, 4])} loop {mid(t[:, 5])} end {mid(t[:, 6])}; ns from first start: starts {mid(t[:, 1] - g)} waited {mid(t[:, 2] - g)} ended {mid(t[:, 7] - g)}; most on a processor {torch.bincount(t[:, 0]).max()}", "cycles/ns", f"{(t[:, 3:7].sum(1) / (t[:, 7] - t[:, 1])).median():.3f}")
        CLOCKS.clear()
    base = BASE[name]
    measure("final")
    if warm:
        for k in FINAL[name]: measure("warm", **k)
        return
    for k in FINAL[name]: measure("", **k)
    measure("final"); plan(); kernels.graphs._graphs.clear(); shown("final")
    say("done", name)
if __name__ == "__main__":
    action, name = sys.argv[1:3]
    what, _, share = action.partition(":")
    if what == "kern": kern(name, *map(int, share.split("/")))
    else: model(name, 2 if what == "warm" else 36, what == "warm")
