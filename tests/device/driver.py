"""The engine's part, played by hand: opens slots, asks for what is due next, and notes what comes back."""

from __future__ import annotations

import random

import torch
from attrs import define, evolve, field

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.buckets import row_counts
from adapters.device.lane.lane import DeviceLane
from adapters.device.sampling.sampler import Draw, Sampler, TokenPick, pick
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, SlotId
from effects.job import Sampling
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from tests.device.fake_shard import FakeShard
from tests.models.checkpoints import proven

VOCAB, BUCKETS, CHUNK = 97, (4, 8, 16, 32), 32
TINY = Qwen3Config(VOCAB, 64, 96, 2, 4, 2, 16, 512, 1e6, tie_word_embeddings=True)
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=3)
PENALISED = Sampling(repetition_penalty=1.8, presence_penalty=0.6, frequency_penalty=0.4, logprobs=2)


def qwen3(slots: int = 4, device: str = "cpu", aux_layers: tuple[int, ...] = ()) -> DenseShard:
    buckets = row_counts(BUCKETS, fast=True)
    shape = {"device": device, "slots": slots, "capacity": 256, "buckets": buckets, "aux_layers": aux_layers}
    if device == "cpu":
        kernels = proven(TINY, torch.float32, 256, buckets).copy_for_shard()
        return DenseShard(TINY, RandomWeights(TINY, scale=0.2), kernels, ShardPlacement(**shape))
    from adapters.models.kernels.cuda.kernels import TritonKernels  # noqa: PLC0415 - Triton comes with CUDA only

    config = evolve(TINY, hidden_size=128, head_dim=64)
    kernels = TritonKernels(torch.device(device))
    return DenseShard(config, RandomWeights(config, scale=0.2), kernels, ShardPlacement(**shape))


@define
class Driver:
    """Plays the engine's part: asks for what is due next and notes what comes back."""

    executor: DeviceExecutor
    requests: int = 0
    launched: list[Launch] = field(factory=list)

    async def open(self, prompt, sampling=GREEDY, slot=0, *, source=None, keep=0, stops=()) -> Caller:
        self.requests += 1
        client = Caller(self, RequestId(self.requests), SlotId(slot), list(prompt), len(prompt), keep)
        opening = OpenSlot(
            client.slot, SlotId(slot if source is None else source), keep, tuple(prompt), sampling, stops
        )
        self.executor.open(client.request, opening)
        return client

    async def perform(self, *effect_requests: EffectRequest):
        """The outcomes, without the time that they took."""
        self.launched.append(Launch(effect_requests))
        outcomes = await self.executor.perform(self.launched[-1])
        return tuple(evolve(outcome, ns=0) if getattr(outcome, "ns", 0) else outcome for outcome in outcomes)

    async def decode(self, *clients: Caller, propose: int = 0):
        outcomes = await self.perform(*[client.round(propose) for client in clients])
        for client, outcome in zip(clients, outcomes, strict=True):
            if isinstance(outcome, Decoded):
                client.take(outcome)
        return outcomes

    async def answer(self, prompt, sampling=GREEDY, count=8, slot=0, *, chunks=(CHUNK,), **how) -> list[int]:
        client = await self.open(prompt, sampling, slot, **how)
        await client.prefill(chunks)
        while len(client.answer) < count:
            await self.decode(client)
        return client.answer


@define
class Caller:
    driver: Driver
    request: RequestId
    slot: SlotId
    tokens: list[int]
    prompt: int
    valid: int
    done: list[Decoded] = field(factory=list)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]

    def chunk(self, stop: int) -> EffectRequest:
        return EffectRequest(self.request, RunPrefill(self.slot, self.valid, stop))

    def round(self, propose: int = 0) -> EffectRequest:
        return EffectRequest(self.request, RunDecode(self.slot, self.valid, self.tokens[-1], propose))

    async def prefill(self, chunks=(CHUNK,)) -> None:
        index = 0
        while self.valid < self.prompt - 1:
            stop = min(self.valid + chunks[min(index, len(chunks) - 1)], self.prompt - 1)
            assert await self.driver.perform(self.chunk(stop)) == (PrefillAdvanced(stop),)
            self.valid, index = stop, index + 1

    def take(self, outcome: Decoded) -> None:
        self.tokens += outcome.tokens
        self.valid += len(outcome.tokens)
        self.done.append(outcome)


def let_run_ahead(driver: Driver) -> None:
    """Have decode steps launched before the ones before them were looked at, as on a GPU."""
    shard = driver.executor.parts.shard
    shard.spec = evolve(shard.spec, runs_ahead=True)


def drive(shard, **options) -> Driver:
    return Driver(DeviceExecutor(ExecutorParts(shard, BUCKETS, lane=DeviceLane(shard.spec.device), **options)))


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def straightforward(kind, prompt, sampling, count) -> list[int]:
    """Each token from one forward over everything before it: no slots, no chunks kept, no batches, no decode steps."""
    shard = FakeShard() if isinstance(kind, FakeShard) else qwen3(1, kind.spec.device.type)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            for start in range(0, len(tokens), CHUNK):
                part = tokens[start : start + CHUNK]
                step = Step((Segment(0, start, len(part)),), CHUNK)
                logits = shard.logits(step, shard.forward(step, torch.tensor(part)).hidden)[len(part) - 1]
                shard.commit(step, [len(part)])
            sampler = Sampler(sampling, tuple(prompt), VOCAB, shard.spec.device)
            if tokens[len(prompt) :]:
                sampler.append(tokens[len(prompt) :])
            (found,) = pick(logits.reshape(1, -1), [Draw(sampler, len(tokens))])
            assert isinstance(found, TokenPick)
            tokens.append(found.token)
    return tokens[len(prompt) :]


async def ready(driver: Driver, count: int = 3) -> list[Caller]:
    clients = [await driver.open(prompt_of(20 + slot, 10 + slot), slot=slot) for slot in range(count)]
    for client in clients:
        await client.prefill()
    return clients
