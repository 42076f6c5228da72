"""Measures where a decode step's time goes between the kernels: streams that decode together, and the engine around the
model.

    python -m benchmarks.step_loop [--shape 8b|30b-a3b] [--layers 24] [--streams 1 8 32] [--tokens 128]
        [--sampling greedy sampled]

The same prompts are decoded in three ways, in turn, in one process. asked: every step is decided once the one before it
has been folded. alone: steps are taken without asking while nothing waits. ahead: on CUDA, each step also begins before
the picks of the one before it were read. `kernels` is the device's time for a step without any waiting. The model has
random weights on one CUDA device, in the shape of the 8B or of Qwen3-30B-A3B, or it is the demo without its draft.
layers: the number of layers of such a model. sampling: how the streams pick, in turn. `held` is `mixed` with answers
that are JSON of a schema, and `greedy held` is `greedy` with them. Tokens of all ways are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import torch
from attrs import define, evolve, field

from adapters.checkpoint.text_files import read_text_files
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import Shard, ShardPlacement
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from adapters.text.grammars.grammar import Grammars, build_json_grammar
from adapters.text.tokenizer import Tokenizer
from benchmarks.arguments import benchmark_parser
from benchmarks.host_experts import SHAPES
from benchmarks.results import Figure, name_shape, publish
from benchmarks.tables import print_table
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.scope import Scope
from effects.stream import EmitTokens
from engine.loading.background_load import load_target
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import build_options
from states import phases
from states.settings import Settings

DEMO = Path(__file__).parents[1] / "adapters" / "demo"
CONTEXTS = {1: 2000}  # tokens of each prompt, by streams; else
CONTEXT = 1000
BUCKETS = (4, 8, 16, 32, 1024)
WAYS = ("asked", "alone", "ahead")
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "kind": {"enum": ["circle", "square", "triangle"]},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,12}$"}},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
HELD = build_json_grammar({"type": "array", "items": ITEM, "minItems": 400})  # no answer here is as long
MIXED = (Sampling(), Sampling(temperature=0.8, top_p=0.95))
QWEN = Sampling(temperature=0.7, top_k=20, top_p=0.8)
SAMPLINGS = {  # of streams in turn
    "mixed": MIXED,
    "held": tuple(evolve(one, grammar=HELD) for one in MIXED),
    "greedy": (Sampling(),),
    "greedy held": (Sampling(grammar=HELD),),
    "sampled": (QWEN,),
    "untruncated": (Sampling(temperature=1),),
    "penalties": (evolve(QWEN, presence_penalty=0.5, repetition_penalty=1.1),),
}


@define
class StepLoop:
    shard: Shard
    executor: DeviceExecutor
    settings: Settings
    lane: DeviceLane


@define
class Stream:
    prompt: Tokens
    tokens: list[int] = field(factory=list)
    times: list[float] = field(factory=list)  # when each message came, and how many tokens it had
    counts: list[int] = field(factory=list)


def build_random(name: str, layers: int) -> StepLoop:
    """Return a model of random weights. layers: 0: all of the shape."""
    from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - Triton comes with CUDA only
    from benchmarks.cuda_model import DEVICE, DTYPE, config_8b  # noqa: PLC0415

    shape_of_all = config_8b(36, 4096) if name == "8b" else SHAPES[name]
    config = evolve(shape_of_all, num_layers=layers or shape_of_all.num_layers)
    slots = 32
    capacity = 2560
    shape = {"device": DEVICE, "dtype": DTYPE, "slots": slots, "capacity": capacity, "buckets": BUCKETS}
    shard = DenseShard(config, RandomWeights(config, 1, DEVICE, DTYPE), TritonKernels(DEVICE), ShardPlacement(**shape))
    lane = DeviceLane(DEVICE)
    settings = Settings(slots=slots, max_context=capacity, chunk=BUCKETS[-1], batch_rows=slots)
    executor = DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=lane))
    executor = DeviceExecutor(
        evolve(executor.parts, match_grammar=Grammars(widen_tokenizer(shard.spec.vocab_size)).match)
    )
    return StepLoop(shard, executor, settings, lane)


def widen_tokenizer(size: int) -> Tokenizer:
    """The demo's tokenizer with pairs of its tokens as further ones, up to a size that models have. Texts are cut into
    its own alone, which is nothing to a grammar: any of them may follow.
    """
    files = read_text_files(DEMO)
    described, added = files.tokenizer, files.tokenizer["added_tokens"]
    vocabulary, controls = described["model"]["vocab"], {token["content"] for token in added}
    plain = [text for text in vocabulary if text not in controls]
    pairs = (one + other for one in plain for other in plain if one + other not in vocabulary)
    first = 1 + max([*vocabulary.values(), *(token["id"] for token in added)])
    model = {**described["model"], "vocab": {**vocabulary, **dict(zip(pairs, range(first, size), strict=False))}}
    return Tokenizer.from_files(evolve(files, tokenizer={**described, "model": model}))


async def demo() -> StepLoop:
    target = await load_target(
        build_options(model="demo", draft="none", disk_prefix_cache="off", host_cache_budget=0, slots=8)
    )
    target.executor = DeviceExecutor(
        evolve(target.executor.parts, match_grammar=Grammars(Tokenizer.load(target.folder)).match)
    )
    return StepLoop(target.shard, target.executor, evolve(target.settings, store=False), target.lane)


@contextmanager
def way(subject: StepLoop, name: str) -> Iterator[None]:
    """asked: no step is taken without asking. alone: and none begins before what the last one picked was read."""
    unwatched = phases.count_unwatched_tokens
    if name == "asked":
        phases.count_unwatched_tokens = lambda *_: 1
    pipeline = subject.executor.parts.shard
    spec = pipeline.spec
    if name != "ahead":
        pipeline.spec = evolve(spec, runs_ahead=False)
    try:
        yield
    finally:
        phases.count_unwatched_tokens = unwatched
        pipeline.spec = spec


async def listen(running: Engine, stream: Stream, count: int, sampling: Sampling) -> None:
    async for message in running.submissions.submit(Job(stream.prompt, count, sampling, scope=Scope("off"))):
        if isinstance(message, EmitTokens):
            stream.times.append(time.perf_counter())
            stream.counts.append(len(message.tokens))
            stream.tokens += message.tokens


async def decode(subject: StepLoop, prompts: list[Tokens], count: int, sampling: str) -> list[Stream]:
    streams = [Stream(prompt) for prompt in prompts]
    async with run_engine(subject.settings, subject.executor) as running:
        async with anyio.create_task_group() as tasks:
            for number, stream in enumerate(streams):
                picks = SAMPLINGS[sampling][number % len(SAMPLINGS[sampling])]
                tasks.start_soon(listen, running, stream, count, evolve(picks, seed=number))
        await running.submissions.wait_until_empty()
    return streams


def figures(streams: list[Stream]) -> dict[str, float]:
    """While all of them decode: from the last first token to the first last one."""
    start, stop = max(one.times[0] for one in streams), min(one.times[-1] for one in streams)
    tokens = sum(
        count for one in streams for at, count in zip(one.times, one.counts, strict=True) if start < at <= stop
    )
    gaps = sorted(
        later - sooner
        for one in streams
        for sooner, later in zip(one.times, one.times[1:], strict=False)
        if start <= sooner and later <= stop
    )
    spent = max(stop - start, 1e-9)
    return {
        "tok/s": tokens / spent,
        "ms a step": 1e3 * spent * len(streams) / max(tokens, 1),
        "gap p50 ms": 1e3 * gaps[len(gaps) // 2],
        "gap p99 ms": 1e3 * gaps[int(len(gaps) * 0.99)],
        "tokens a message": tokens / max(1, len(gaps)),
    }


def kernels(subject: StepLoop, streams: int, context: int, steps: int = 24) -> float:
    """Milliseconds of a step that feeds what the last one picked, where nothing is read in between."""
    bucket = next(one for one in subject.shard.spec.buckets if one >= streams)
    tokens = torch.zeros(streams, dtype=torch.int64, device=subject.shard.spec.device)
    spent = list[float]()
    with torch.inference_mode():
        for at in range(steps + 4):
            step = Step(tuple(Segment(slot, context + at, 1) for slot in range(streams)), bucket)
            if at == 4:
                subject.shard.synchronize()
                spent.append(time.perf_counter())
            tokens = subject.shard.logits(step, subject.shard.forward(step, tokens).hidden)[:streams].argmax(-1)
            subject.shard.commit(step, [1] * streams)
        subject.shard.synchronize()
    return 1e3 * (time.perf_counter() - spent[0]) / steps


async def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    subject = await demo() if given.shape == "demo" else build_random(given.shape, given.layers)
    vocabulary, rows = subject.shard.spec.vocab_size, list[dict[str, Any]]()
    for streams in given.streams:
        context = min(CONTEXTS.get(streams, CONTEXT), subject.settings.max_context - given.tokens - 8)
        step_ms = await subject.lane.run(lambda n=streams, at=context: kernels(subject, n, at))
        made = torch.randint(5, vocabulary - 5, (streams, context), generator=torch.Generator().manual_seed(streams))
        prompts = [tuple(prompt) for prompt in made.tolist()]
        for sampling in given.sampling:
            answers = dict[str, list[list[int]]]()
            for number, name in enumerate(given.ways):
                with way(subject, name):
                    if not number:
                        await decode(subject, prompts, 4, sampling)  # graphs are recorded
                    results = await decode(subject, prompts, given.tokens, sampling)
                answers[name] = [one.tokens for one in results]
                differing = sum(one != other for one, other in zip(answers[name], answers[given.ways[0]], strict=True))
                found = figures(results)
                row = {"streams": streams, "sampling": sampling, "way": name, **found, "kernels ms": step_ms}
                rows.append({**row, "of kernels": step_ms / found["ms a step"], "differing": differing})
    await anyio.to_thread.run_sync(subject.executor.close)
    return rows


def make_figures(rows: list[dict[str, Any]], shape: str) -> list[Figure]:
    """Make figures of the way that serves, by how tokens are picked."""
    return [
        Figure(
            "streams", f"{name_shape(shape)} in process, {row['sampling']}", str(row["streams"]), "tok/s", row["tok/s"]
        )
        for row in rows
        if row["way"] == "ahead"
    ]


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=("8b", "30b-a3b", "demo"), default="demo")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--sampling", nargs="+", choices=tuple(SAMPLINGS), default=["mixed"])
    parser.add_argument("--switch-ms", type=float, help="how long a thread may keep Python's lock while others wait")
    given = parser.parse_args()
    if given.switch_ms:
        sys.setswitchinterval(given.switch_ms / 1e3)
    rows = anyio.run(measure, given)
    print_table("Streams that decode together", rows)
    results = {"rows": rows, "switch_ms": sys.getswitchinterval() * 1e3}
    publish(given, f"step_loop-{given.shape}", results, make_figures(rows, given.shape))
    return 0 if not any(row["differing"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
