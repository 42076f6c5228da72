"""An 8B-shaped Qwen3 with an 8B-shaped draft, random weights, on one CUDA device: what steps cost, where weights are.

Part of `benchmarks.speculation` (parts steps, residency). With random weights a draft is never right, so acceptance is
forced: the draft does all its work, and what it says is replaced by what the target is known to pick, up to a length.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import torch
from attrs import define, evolve, field
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.drafting import Drafting
from adapters.device.speculation.launched_proposals import LaunchedProposals
from adapters.device.speculation.proposal_tree import Tree, chain
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import Kept, ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest as Wanted
from adapters.models.drafts.cached_draft import CachedDraft
from adapters.models.drafts.dflash.checkpoint import list_draft_tensors
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.cuda_model import DEVICE, DTYPE, config_8b
from benchmarks.tables import median
from effects.all import EffectRequest, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Job, Sampling
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel, UnloadModel
from effects.scope import Scope
from effects.stream import EmitTokens
from engine.serving.wiring import run_engine
from states.residency import Policy, resolve_residency
from states.settings import Settings

LAYERS, BLOCK = 36, 16
AUX_LAYERS = (1, 9, 17, 25, 33)
BUCKETS = (4, 8, 16, 32, 1024)
CONTEXT, CAPACITY = 2048, 4096
ACCEPTED = (1, 4, 8, 16)
STEPS, PASSES = 10, 8  # of a short run of each acceptance
NOT_TOLD = {"least ms": 0.0, "p90 ms": 0.0, "ms proposing": 0.0}  # of rows that are not taken in turn
POLICIES: tuple[Policy, ...] = ("persistent", "auto", "request-scoped")


@define
class DeviceDraft:
    """Weights of any draft, made on the device."""

    config: DFlashConfig
    shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.shapes = list_draft_tensors(self.config)

    def read(self, name: str) -> Tensor:
        key = hashlib.blake2b(name.encode(), digest_size=7).digest()
        generator = torch.Generator(DEVICE).manual_seed(int.from_bytes(key, "little"))
        tensor = torch.empty(self.shapes[name], device=DEVICE, dtype=DTYPE).normal_(0.0, 0.02, generator=generator)
        return tensor.add_(1.0) if tensor.dim() == 1 else tensor

    def has_tensor(self, name: str) -> bool:
        return name in self.shapes

    def digest(self) -> str:
        return "random"


@define(eq=False)
class Forced(Proposer):
    """The draft does its work; then so many of the tokens that will come are proposed, and a wrong one behind them."""

    drafting: Proposer
    known: Tokens
    right: int
    # Of proposing: until the host has read the proposals, or has launched them.
    took_ns: list[int] = field(factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        started = time.perf_counter_ns()
        proposed = self.drafting.propose(requests)
        self.took_ns.append(time.perf_counter_ns() - started)
        return [self.replaced(request, tree) for request, tree in zip(requests, proposed, strict=True)]

    def launch_proposals(self, requests: Sequence[DraftRequest]) -> LaunchedProposals | None:
        """Launch the draft's chains, and behind them the tokens that are proposed instead."""
        started = time.perf_counter_ns()
        launched = self.drafting.launch_proposals(requests)
        if launched is None:
            return None
        self.took_ns.append(time.perf_counter_ns() - started)
        width = launched.tokens.shape[1]
        rows = [self.forced(request, width) for request in requests if request.slot in launched.counts]
        tokens = torch.tensor(rows).to(launched.tokens.device, non_blocking=True)
        return LaunchedProposals(tokens, launched.counts)

    def replaced(self, request: DraftRequest, tree: Tree) -> Tree:
        return chain((request.state.tokens[-1], *self.forced(request, tree.size)))

    def forced(self, request: DraftRequest, size: int) -> list[int]:
        """Return so many proposals: the right ones, then wrong ones."""
        at = len(request.state.tokens)
        coming = list(self.known[at : at + min(self.right, size)])
        wrong = [(token + 1) % 100 for token in self.known[at + len(coming) : at + size]]
        return [*coming, *wrong, *([0] * (size - len(coming) - len(wrong)))]

    def follow(
        self,
        step: Step,
        aux_hidden_states: Mapping[int, Tensor],
        kept: Sequence[Kept],
        states: Sequence[SlotState],
        plain_steps: int = 0,
    ) -> None:
        self.drafting.follow(step, aux_hidden_states, kept, states, plain_steps)

    def catch_up(self, slot: int) -> None:
        self.drafting.catch_up(slot)

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        self.drafting.inherit_rows(source, target, state)


@define(eq=False)
class Pair:
    shard: DenseShard
    draft: CachedDraft[Any]
    lane: DeviceLane
    executor: DeviceExecutor
    drafting: Drafting[CachedDraft[Any]]


def build(lane: DeviceLane, slots: int = 1, buckets: Sequence[int] = BUCKETS, layers: int = LAYERS) -> Pair:
    """Build the target with a DFlash draft."""
    drafts = DFlashConfig(
        4096, 12288, 5, 32, 8, 128, Rotary(128, 1e6), (AttentionMask(),) * 5, AUX_LAYERS, BLOCK, 151669
    )
    return build_pair(
        lane, AUX_LAYERS, partial(DFlashDraft, drafts, DeviceDraft(drafts)), slots=slots, buckets=buckets, layers=layers
    )


def build_pair(
    lane: DeviceLane,
    aux_layers: Sequence[int],
    build_draft: Callable[..., CachedDraft[Any]],
    *,
    slots: int = 1,
    buckets: Sequence[int] = BUCKETS,
    layers: int = LAYERS,
) -> Pair:
    """Build the target and a draft that reads these layers. build_draft: takes kernels, the head and the placement."""
    config = config_8b(layers, CAPACITY)
    shape = {"device": DEVICE, "dtype": DTYPE, "slots": slots, "capacity": CAPACITY, "buckets": buckets}
    shard = DenseShard(
        config,
        RandomWeights(config, 1, DEVICE, DTYPE),
        TritonKernels(DEVICE),
        ShardPlacement(aux_layers=tuple(aux_layers), **shape),
    )
    draft = build_draft(TritonKernels(DEVICE), Pipeline((shard,)).head, DraftPlacement(**shape))
    drafting = Drafting(draft, buckets)
    handlers = {LoadModel: drafting.load_back, UnloadModel: drafting.offload}
    executor = DeviceExecutor(ExecutorParts(shard, buckets, lane=lane, handlers=handlers))
    return Pair(shard, draft, lane, executor, drafting)


def prompt() -> Tokens:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, 150_000, (CONTEXT,), generator=generator).tolist())


# --- steps ---


def decode_with_width(pair: Pair, proposer: Proposer, width: int, most: int) -> tuple[Tokens, list[Decoded]]:
    """On the lane: greedy rounds that propose so many, until there are `most` tokens."""
    known, request, slot = list(prompt()), RequestId(0), SlotId(0)
    pair.executor = DeviceExecutor(evolve(pair.executor.parts, proposer=proposer))
    done = list[Decoded]()

    def following(outcomes: Sequence[Outcome]) -> EffectRequest | None:
        filled = max((getattr(outcome, "stop", 0) for outcome in outcomes), default=0)
        if filled < CONTEXT - 1:
            return EffectRequest(request, RunPrefill(slot, filled, min(filled + BUCKETS[-1], CONTEXT - 1)))
        if isinstance(outcomes[-1], Decoded):
            done.append(outcomes[-1])
            known.extend(outcomes[-1].tokens)
        if len(known) - CONTEXT >= most:
            return None
        return EffectRequest(request, RunDecode(slot, len(known) - 1, known[-1], width))

    pair.executor.rehearse(OpenSlot(slot, slot, 0, prompt(), Sampling()), following)
    return tuple(known), done


def steps(pair: Pair) -> list[dict[str, Any]]:
    """On the lane. The plain step is timed with the draft out of the way, then with one that follows."""
    answer = 160
    pair.draft.offload()
    plain, done = decode_with_width(pair, pair.drafting, 0, answer + BLOCK)
    base = median(one.ns for one in done[8:]) / 1e6
    rows = [row("plain, no draft", base, plain, plain, done)]
    pair.draft.load_back()
    found, done = decode_with_width(pair, pair.drafting, 0, answer)
    rows.append(row("plain, a draft that follows", base, plain, found, done))
    for accepted in ACCEPTED:  # records graphs: the bucket at which the draft follows is that of what is accepted
        decode_with_width(pair, Forced(pair.drafting, plain, accepted - 1), BLOCK - 1, 4 * accepted)
    rows += in_turn(pair, base, plain)
    forced = Forced(pair.drafting, plain, 0)
    found, done = decode_with_width(pair, forced, BLOCK - 1, answer)
    rows.append(row(f"forced acceptance 1, {answer} decode steps in a row", base, plain, found, done))
    # A recurrent target goes on from where it is, so it cannot be asked for the same rows again and again.
    return rows if pair.shard.states.specs else [*rows, *pieces(pair, base)]


def in_turn(pair: Pair, base: float, plain: Tokens) -> list[dict[str, Any]]:
    """Measure the same number of decode steps of every acceptance, in several short runs, in turn and in either order.

    All of them launch the same graphs but for the bucket at which the draft follows. So what differs between them is
    that cost, and what differs between runs of the same acceptance is the machine.
    """
    done: dict[int, list[Decoded]] = {accepted: [] for accepted in ACCEPTED}
    tokens: dict[int, Tokens] = {}
    proposing: dict[int, list[int]] = {accepted: [] for accepted in ACCEPTED}
    for number in range(PASSES):
        for accepted in ACCEPTED if number % 2 == 0 else ACCEPTED[::-1]:
            forced = Forced(pair.drafting, plain, accepted - 1)
            tokens[accepted], decode_steps = decode_with_width(pair, forced, BLOCK - 1, STEPS * accepted)
            done[accepted] += decode_steps[2:-1]
            proposing[accepted] += forced.took_ns[2:-1]
    rows = list[dict[str, Any]]()
    for accepted in ACCEPTED:
        spent = sorted(one.ns / 1e6 for one in done[accepted])
        rows.append(row(f"forced acceptance {accepted}", base, plain, tokens[accepted], done[accepted], cut=False))
        rows[-1] |= {"least ms": spent[0], "p90 ms": spent[len(spent) * 9 // 10]}
        rows[-1] |= {"ms proposing": median(proposing[accepted]) / 1e6}
    return rows


def row(
    what: str, base: float, plain: Tokens, found: Tokens, done: Sequence[Decoded], *, cut: bool = True
) -> dict[str, Any]:
    """cut: without the decode steps at the start, which may record graphs, and the last one, which may be cut."""
    steady = done[2:-1] if cut else done
    spent, tokens = median(one.ns for one in steady) / 1e6, sum(len(one.tokens) for one in steady) / len(steady)
    common = min(len(plain), len(found))
    return {
        "what": what,
        "tokens a decode step": round(tokens, 2),
        "ms a decode step": spent,
        "x plain": tokens * base / spent,
        "differing": sum(one != other for one, other in zip(plain[:common], found[:common], strict=True)),
        **NOT_TOLD,
    }


def pieces(pair: Pair, base: float) -> list[dict[str, Any]]:
    """Measure the parts of a decode step of a whole block."""
    tokens = torch.zeros(BLOCK, dtype=torch.int64)
    step = Step((Segment(0, CONTEXT, BLOCK),), BLOCK)

    def verify() -> None:
        pair.shard.logits(step, pair.shard.forward(step, tokens).hidden).argmax(-1).tolist()

    draft = pair.draft
    assert isinstance(draft, DFlashDraft)

    def propose() -> None:
        draft.logits([Wanted(0, 0, CONTEXT, 1, BLOCK - 1)]).argmax(-1).tolist()

    aux_hidden_states = pair.shard.forward(step, tokens).aux_hidden_states
    work: dict[str, Callable[[], None]] = {
        "verify 16 rows": verify,
        "propose 15": propose,
        "follow 16 rows": lambda: pair.draft.extend(step, tokens, aux_hidden_states),
    }
    rows = []
    for name, run in work.items():
        spent = list[float]()
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            spent.append((time.perf_counter() - start) * 1e3)
        ms = median(spent[4:])
        reported = {
            "what": name,
            "tokens a decode step": 0.0,
            "ms a decode step": ms,
            "x plain": ms / base,
            "differing": 0,
        }
        rows.append(reported | NOT_TOLD)
    return rows


# --- residency ---


async def residency(pair: Pair) -> list[dict[str, Any]]:
    """Device bytes before, during and after a request, by policy."""
    rows = list[dict[str, Any]]()
    pair.executor = DeviceExecutor(evolve(pair.executor.parts, proposer=pair.drafting))
    for policy in POLICIES:
        resolution, _ = resolve_residency(policy, has_draft=True, has_prompt_scorer=False)
        await pair.lane.run(pair.draft.offload if resolution.draft == "park" else pair.draft.load_back)
        settings = Settings(
            slots=1,
            max_context=CAPACITY,
            chunk=BUCKETS[-1],
            batch_rows=BLOCK,
            max_proposals=BLOCK - 1,
            residency=resolution,
        )
        job = Job(prompt(), 24, scope=Scope("off"))
        async with run_engine(settings, pair.executor) as running:
            rows.append(await measure_memory(pair, policy, "idle"))
            async for message in running.submissions.submit(job):
                if isinstance(message, EmitTokens) and rows[-1]["stage"] == "idle":
                    rows.append(await measure_memory(pair, policy, "decoding"))
            with anyio.fail_after(30):
                await running.submissions.wait_until_empty()
            rows.append(await measure_memory(pair, policy, "afterwards"))
    return rows


async def measure_memory(pair: Pair, policy: str, stage: str) -> dict[str, Any]:
    """Return in MB what the ledger says, and what CUDA has allocated."""
    draft, target = pair.draft.memory(), pair.shard.memory()
    allocated = await pair.lane.run(torch.cuda.memory_allocated)
    figures = {
        "target weights": target["weights"],
        "draft weights": draft["weights"],
        "draft, pinned on host": draft["host"],
        "rows": target["kv"] + draft["kv"],
        "allocated": allocated,
    }
    return {"policy": policy, "stage": stage, **{name: round(size / 1e6) for name, size in figures.items()}}


def moves(pair: Pair) -> list[dict[str, Any]]:
    """On the lane: GB/s of parking and unparking against plain copies of pinned memory of the same size."""
    pair.draft.release()
    pair.draft.load_back()
    found: dict[str, list[float]] = {"park (first: copied out)": [], "unpark": [], "park again": []}
    size = pair.draft.memory()["weights"]
    again = [("unpark", pair.draft.load_back), ("park again", pair.draft.offload)] * 3
    for name, run in [("park (first: copied out)", pair.draft.offload), *again]:
        found[name].append(size / time_run(run) / 1e9)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for name, run in (
        ("pinned copy to the device", lambda: device.copy_(host, non_blocking=True)),
        ("pinned copy to the host", lambda: host.copy_(device, non_blocking=True)),
    ):
        found[name] = [size / time_run(run) / 1e9 for _ in range(4)]
    pair.draft.load_back()
    return [{"what": name, "MB": round(size / 1e6), "GB/s": max(rates)} for name, rates in found.items()]


def time_run(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


async def measure_parts(parts: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    lane = DeviceLane(DEVICE)
    pair = await lane.run(partial(build, lane))
    found: dict[str, list[dict[str, Any]]] = {}
    if "steps" in parts:
        found["steps"] = await lane.run(partial(steps, pair))
    if "residency" in parts:
        found["residency"] = await residency(pair)
        found["moves"] = await lane.run(partial(moves, pair))
    pair.executor.close()
    return found


def measure_8b(parts: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    return anyio.run(measure_parts, parts)
