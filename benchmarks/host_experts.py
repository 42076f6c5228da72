"""Experts in host memory, those used most on the device, against all on the device and all on the CPU. Random weights.

    python -m benchmarks.host_experts [--shape 30b-a3b|small] [--device cuda|cpu] [--gib 12] [--cpu-layers 6]
        [--parts host,device]

--gib: of the device for everything: the layers' other weights, rows, buffers, and what is left for experts. Weights are
made on the device, and the same for each; that the same logits come out, bit for bit, is checked. Decoding is one row a
step over 256 rows of context, prefill a chunk. Which experts a row of random weights goes through depends on its token
most of all, so tokens are drawn in two ways: all alike, which is the worst case, and as often as words are in a text
(the n-th as often as 1 / n). The policy is the served one, fed what the device reports. On the CPU so many layers are
there as --cpu-layers says, and their time is counted as often as makes up all layers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3_moe import Qwen3MoeConfig
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, name_shape, publish
from benchmarks.tables import median, print_table
from engine.loading.memory.expert_placement import assign_first_experts, count_expert_weights
from states.experts import Residents, choose_moves, make_residents

CONTEXT = 256
SHAPES = {
    "30b-a3b": Qwen3MoeConfig(
        151936, 2048, 6144, 48, 32, 4, 128, 40960, 1e6, experts=ExpertsShape(128, 8, 768, is_normalized=True)
    ),
    "small": Qwen3MoeConfig(512, 128, 256, 3, 4, 2, 64, 2048, 1e6, experts=ExpertsShape(16, 2, 64, is_normalized=True)),
}
TOKENS = ("all alike", "as in a text")


@frozen
class Setting:
    config: Qwen3MoeConfig
    device: torch.device
    dtype: torch.dtype
    chunk: int
    steps: int  # of a measured round of decoding

    @property
    def capacity(self) -> int:
        return CONTEXT + self.chunk + 256


def kernels_for(setting: Setting, device: torch.device) -> Kernels:
    if device.type == "cuda":
        from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - needs Triton

        return TritonKernels(device)
    if setting.device.type == "cpu":  # stands for a device: weights that can be copied
        return ReferenceKernels()
    how = {"capacity": setting.capacity, "dtype": setting.dtype, "threads": torch.get_num_threads()}
    proof = CpuKernels(setting.dtype).prove(setting.config.products((4, setting.chunk), **how))
    assert proof.plan is not None, proof.failures
    return CpuKernels(setting.dtype).with_plan(proof.plan)


def build_shard(setting: Setting, device: torch.device, offloaded: HostExperts | None = None) -> DenseShard:
    config = setting.config
    weights = RandomWeights(config, device=setting.device, dtype=setting.dtype, scale=config.hidden_size**-0.5)
    shape = {"dtype": setting.dtype, "slots": 1, "capacity": setting.capacity, "buckets": (4, setting.chunk)}
    return DenseShard(
        config, weights, kernels_for(setting, device), ShardPlacement(device=device, **shape), offloaded=offloaded
    )


def draw_tokens(setting: Setting, how: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = setting.config.vocab_size
    if how == "all alike":
        return torch.randint(0, vocabulary, (4096,), generator=generator)
    often = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return torch.multinomial(often, 4096, replacement=True, generator=generator)


class Runs:
    """The work that a shard is asked for, wherever its experts are."""

    def __init__(self, setting: Setting, shard: DenseShard) -> None:
        self.setting, self.shard, self.at = setting, shard, 0

    def decode(self, tokens: torch.Tensor, steps: int) -> float:
        """Seconds a step."""
        self.shard.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step = Step((Segment(0, CONTEXT, 1),), 4)
            self.at = (self.at + 1) % len(tokens)
            self.shard.logits(step, self.shard.forward(step, tokens[self.at : self.at + 1]).hidden)
        self.shard.synchronize()
        return (time.perf_counter() - start) / steps

    def prefill(self, tokens: torch.Tensor) -> float:
        chunk = self.setting.chunk
        start = time.perf_counter()
        self.shard.forward(Step((Segment(0, 0, chunk),), chunk, rows_only=True), tokens[:chunk])
        self.shard.synchronize()
        return time.perf_counter() - start

    def digest(self) -> str:
        """Return a digest of the logits of some rows, each computed by a step of its own behind a chunk."""
        tokens, chunk, found = (
            draw_tokens(self.setting, "all alike", 9),
            self.setting.chunk,
            hashlib.blake2b(digest_size=8),
        )
        self.prefill(tokens)
        for at in range(4):
            step = Step((Segment(0, chunk + at, 1),), 4)
            logits = self.shard.logits(step, self.shard.forward(step, tokens[chunk + at : chunk + at + 1]).hidden)
            found.update(logits[0].cpu().numpy().tobytes())
        return found.hexdigest()


def measure_speeds(runs: Runs, how: str, rounds: int = 3) -> dict[str, Any]:
    tokens = draw_tokens(runs.setting, how, 1)
    decode = [1 / runs.decode(tokens, runs.setting.steps) for _ in range(rounds)]
    prefill = [runs.setting.chunk / runs.prefill(tokens[at * 64 :]) for at in range(rounds)]
    return {"decode": decode, "prefill": prefill}


def learn_residents(runs: Runs, offloaded: HostExperts, residents: Residents, how: str, reports: int) -> Residents:
    """After so many reports of steps with such tokens."""
    tokens = draw_tokens(runs.setting, how, 2)
    for _ in range(reports):
        counts: tuple[int, ...] = ()
        while not counts:
            runs.decode(tokens, 8)
            counts = offloaded.report()
        residents, moves = choose_moves(residents, counts)
        offloaded.move_experts(moves)
    return residents


def host(setting: Setting, gib: float, reports: int, draws: Sequence[str], found: dict[str, Any]) -> str:
    config, itemsize = setting.config, setting.dtype.itemsize
    shapes = config.tensors()
    others = sum(torch.Size(shape).numel() for shape in shapes.values()) - count_expert_weights(config)
    rows = setting.capacity * config.kv_bytes_per_token(setting.dtype)
    logits = 8 * config.vocab_size * 4 + 4 * setting.chunk * config.hidden_size * itemsize
    room = int(gib * (1 << 30)) - others * itemsize - rows - logits
    assert config.experts is not None
    hosted, began = HostExperts(setting.device, config.experts.count, room), time.perf_counter()
    shard = build_shard(setting, setting.device, hosted)
    assign_first_experts(hosted)
    runs, residents = Runs(setting, shard), make_residents(hosted.experts, hosted.expert_slots)
    memory, said = shard.memory(), runs.digest()
    found["host, memory"] = {**hosted.build_figures(), **memory, "loaded_s": time.perf_counter() - began}
    print("host:", found["host, memory"], flush=True)
    for how in draws:
        for when in ("before", "after"):
            if when == "after":
                residents = learn_residents(runs, hosted, residents, how, reports)
            figures = measure_speeds(runs, how)
            now = hosted.build_figures()
            runs.decode(draw_tokens(setting, how, 3), setting.steps)
            last = hosted.build_figures()
            needed, brought = last["needed"] - now["needed"], last["brought"] - now["brought"]
            figures |= {"brought_of_needed": brought / needed, "moved": last["moved"]}
            found[f"host, {how}, {when} the policy"] = figures
            print(how, when, figures, flush=True)
    assert runs.digest() == said, "bits changed with the places"
    shard.close()
    return said


def device(setting: Setting, said: str, draws: Sequence[str], found: dict[str, Any]) -> None:
    shard = build_shard(setting, setting.device)
    runs = Runs(setting, shard)
    assert not said or runs.digest() == said, "other bits than with experts in host memory"
    found["device, memory"] = shard.memory()
    for how in draws:
        found[f"device, {how}"] = measure_speeds(runs, how)
        print("device", how, found[f"device, {how}"], flush=True)
    shard.close()


def processor(setting: Setting, layers: int, found: dict[str, Any]) -> None:
    """Layers are all alike, so the time of so many, less that of the head, is counted as often as makes up all."""
    began, whole = time.perf_counter(), setting.config.num_layers
    few = evolve(setting, config=evolve(setting.config, num_layers=layers), steps=16)
    runs = Runs(few, build_shard(few, torch.device("cpu")))
    step = Step((Segment(0, CONTEXT, 1),), 4)
    hidden = runs.shard.forward(step, torch.zeros(1, dtype=torch.int64)).hidden
    head = quickest(lambda: runs.shard.logits(step, hidden))
    figures = measure_speeds(runs, "all alike")
    figures["decode"] = [1 / ((1 / one - head) * whole / layers + head) for one in figures["decode"]]
    figures["prefill"] = [one * layers / whole for one in figures["prefill"]]
    found["cpu, all alike"] = {**figures, "layers": layers, "head_s": head, "loaded_s": time.perf_counter() - began}
    print("cpu", found["cpu, all alike"], flush=True)


def quickest(run: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def line(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "experts, tokens": name,
        "decode, tokens/s": median(figures["decode"]),
        "prefill, rows/s": median(figures["prefill"]),
        "brought of needed": figures.get("brought_of_needed", "-"),
    }


def make_figures(lines: list[dict[str, Any]], shape: str) -> list[Figure]:
    """Make the figures of decoding. `benchmarks.family_speeds` compares experts on the device with their bytes."""
    return [
        Figure("decode", f"{name_shape(shape)}, experts", one["experts, tokens"], "tok/s", one["decode, tokens/s"])
        for one in lines
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gib", type=float, default=12)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--reports", type=int, default=8, help="of 32 steps or more, that the policy learns from")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--cpu-layers", type=int, default=6, help="0: nothing on the CPU")
    parser.add_argument("--parts", type=lambda given: given.split(","), default=("host", "device"))
    parser.add_argument("--draws", type=int, default=len(TOKENS), help="1: tokens all alike only")
    given = parser.parse_args()
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    setting = Setting(SHAPES[given.shape], torch.device(given.device), dtype, given.chunk, given.steps)
    found = dict[str, Any]()
    with torch.inference_mode():
        said = ""
        if "host" in given.parts:
            said = host(setting, given.gib, given.reports, TOKENS[: given.draws], found)
        if "device" in given.parts:
            device(setting, said, TOKENS[: given.draws], found)
        if given.cpu_layers:
            processor(setting, given.cpu_layers, found)
    lines = [line(name, figures) for name, figures in found.items() if "decode" in figures]
    print_table(f"{given.shape}: {given.gib} GiB of {given.device}, chunks of {given.chunk} rows", lines)
    publish(
        given,
        "host_experts",
        {"shape": given.shape, "gib": given.gib, "found": found},
        make_figures(lines, given.shape),
        given.device,
    )


if __name__ == "__main__":
    main()
