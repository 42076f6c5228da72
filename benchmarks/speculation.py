"""Measures speculation: how much sooner answers come, what the draft is right about, what trees and steps cost, and
where the draft's weights are.

    python -m benchmarks.speculation [--parts speed,acceptance,tier] [--device cpu] [--record]

speed: decode tokens/s of the same answers without a draft, with one, and with trees, in turn, by subject. The engine
itself decides how wide to speculate. limit: what answers of 512 tokens lose to a draft whose use cannot be foreseen.
acceptance: tokens of a decode step when every step is as wide as possible. tier: whether the proposals after a restore
are those of a cold prompt. On CUDA, steps compares an 8B-shaped target and draft with random weights and forced
acceptance with the same target's plain step. On CUDA, residency shows device bytes by stage for each policy, and
compares parking with a plain copy of pinned memory. Prompts are held-out text (`benchmarks/subjects.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from attrs import define, evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposal_tree import Tree
from adapters.device.speculation.proposer import DraftModel, DraftRequest, Proposer
from adapters.models.decoder.shard import Kept
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.kernels.step import Step
from adapters.text.model_text import Text
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.subjects import NAMES, prompts
from benchmarks.tables import median, print_table
from effects.all import EffectRequest, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Job, Report, Sampling
from effects.ports import Closed
from effects.prefill import OpenSlot, RunPrefill
from effects.scope import Scope
from effects.stream import EmitTokens
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.serve import freeze_collected
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import Options, build_options, evolve_options
from states import step_prices
from states.rates import Rates, TimedStep

SAMPLED = Sampling(temperature=0.8, top_p=0.95)
LONGEST = 512  # tokens of a prompt
TREE = 22


@define
class TimedAnswer:
    """The time of an answer. seconds: of decoding alone."""

    tokens: Tokens = ()
    seconds: float = 0.0
    report: Report | None = None


async def answer(running: Engine, job: Job) -> TimedAnswer:
    found = TimedAnswer()
    async for message in running.submissions.submit(job):
        match message:
            case EmitTokens(tokens):
                found.tokens += tokens
            case Closed():
                found.report, found.seconds = message.report, message.stages_ms.get("Speculating", 0.0) / 1000
            case _:
                pass
    return found


# --- speed ---


async def speed(targets: Mapping[str, LoadedModel], ends: Tokens, count: int, most: int) -> list[dict[str, Any]]:
    """Every answer in every way, one right after the other. targets: by way; `plain` does without its draft."""
    rows = list[dict[str, Any]]()
    subjects = prompts(list(NAMES), count, LONGEST)
    freeze_collected()  # one look through all that the prompts come from takes as long as a hundred steps
    for subject, asked in subjects.items():
        for name, sampling in (("greedy", Sampling()), ("sampled", SAMPLED)):
            took: dict[str, list[TimedAnswer]] = {way: [] for way in targets}
            for number, prompt in enumerate(asked):
                job = Job(prompt, most, evolve(sampling, seed=number), ends, Scope("off"))
                for way, target in targets.items():
                    async with run_engine(target.settings, target.executor) as running:
                        took[way].append(await answer(running, evolve(job, speculate=way != "plain")))
            differing = sum(
                one.tokens != other.tokens
                for answers in took.values()
                for one, other in zip(took["plain"], answers, strict=True)
            )
            rows.append({"subject": subject, "sampling": name, **rates(took), "differing": differing})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def rates(took: Mapping[str, list[TimedAnswer]]) -> dict[str, Any]:
    """Tokens a second, after the first token of each answer; and against plain decoding."""
    found: dict[str, Any] = {"tokens": sum(len(one.tokens) for one in took["plain"])}
    spent = {way: sum(one.seconds for one in answers) for way, answers in took.items()}
    for way, answers in took.items():
        found[f"{way} tok/s"] = round(found["tokens"] / spent[way], 1)
        if way != "plain":
            decode_steps = sum(one.report.decode_steps for one in answers if one.report is not None)
            found[f"{way} x"] = round(spent["plain"] / spent[way], 3)
            found[f"{way} tok/decode step"] = round(found["tokens"] / decode_steps, 2)
    return found


# --- limit ---

NOISE = {"code at 1": (1.0, "code"), "noise at 1": (1.0, ""), "noise at 1.6": (1.6, ""), "never right": (0, "code")}
NEVER = 0  # an unused control token, which the demo never says


async def limit(target: LoadedModel, count: int) -> list[dict[str, Any]]:
    """Answers of 512 tokens, plain and with the draft in turn; x: plain time over drafted time, of each pair."""
    draw = random.Random(0)
    vocabulary = target.checkpoint.config.vocab_size
    rows = list[dict[str, Any]]()
    for name, (temperature, subject) in NOISE.items():
        noise = [tuple(draw.randrange(16, vocabulary) for _ in range(100)) for _ in range(count)]
        asked = prompts([subject], count, LONGEST)[subject] if subject else noise
        freeze_collected()
        if name == "never right":
            never_right(target.draft)
        took: dict[str, list[TimedAnswer]] = {"plain": [], "chain": []}
        for number, prompt in enumerate(asked):
            job = Job(prompt, 512, Sampling(temperature=temperature, seed=number), (), Scope("off"))
            for way in ("plain", "chain") if number % 2 else ("chain", "plain"):
                async with run_engine(target.settings, target.executor) as running:
                    took[way].append(await answer(running, evolve(job, speculate=way != "plain")))
        pairs = [one.seconds / other.seconds for one, other in zip(took["plain"], took["chain"], strict=True)]
        why = {one.report.speculation for one in took["chain"] if one.report is not None}
        spread = {"median x": median(pairs), "least x": min(pairs), "why": ",".join(sorted(filter(None, why)))}
        rows.append({"answers": name, **rates(took), **spread})
        print(json.dumps(rows[-1]), flush=True)
    return rows


# --- acceptance ---


async def acceptance(target: LoadedModel, ends: Tokens, count: int, most: int) -> list[dict[str, Any]]:
    """Tokens a decode step at several widths that never change, the widest a tree; an answer's last decode step counts
    whole."""
    assert target.draft is not None
    rows = list[dict[str, Any]]()
    block = target.draft.block
    widths = sorted({min(7, block - 1), block - 1, max(block, TREE)})
    for subject, asked in prompts(list(NAMES), count, LONGEST).items():
        for name, sampling in (("greedy", Sampling()), ("sampled", SAMPLED)):
            row: dict[str, Any] = {"subject": subject, "sampling": name}
            for width in widths:
                tokens, decode_steps, ns = 0, 0, list[float]()
                for prompt in asked:
                    job = Job(prompt, most, sampling, ends)
                    done = await target.lane.run(partial(decode_with_width, target, job, width))
                    tokens, decode_steps = tokens + sum(len(one.tokens) for one in done), decode_steps + len(done)
                    ns += [one.ns / 1e6 for one in done]
                row |= {
                    f"width {width}": round(tokens / decode_steps, 2),
                    f"ms a decode step at {width}": round(median(ns), 2),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def decode_with_width(target: LoadedModel, job: Job, width: int) -> list[Decoded]:
    """On the lane: every decode step proposes so many."""
    known, request, slot = list(job.prompt), RequestId(0), SlotId(0)
    done = list[Decoded]()

    def following(outcomes: Sequence[Outcome]) -> EffectRequest | None:
        filled = max((getattr(outcome, "stop", 0) for outcome in outcomes), default=0)
        if filled < len(job.prompt) - 1:
            stop = min(filled + target.settings.chunk, len(job.prompt) - 1)
            return EffectRequest(request, RunPrefill(slot, filled, stop))
        if outcomes and isinstance(outcomes[-1], Decoded):
            done.append(outcomes[-1])
            known.extend(outcomes[-1].tokens)
            if len(known) - len(job.prompt) >= job.max_tokens or known[-1] in job.stop_tokens:
                return None
        return EffectRequest(request, RunDecode(slot, len(known) - 1, known[-1], width))

    target.executor.rehearse(OpenSlot(slot, slot, 0, job.prompt, job.sampling, job.stop_tokens), following)
    return done


# --- tiers ---


@define(eq=False)
class WatchedProposer(Proposer):
    """A proposer that records what it proposes, and after which tokens."""

    proposer: Proposer
    seen: dict[tuple[Tokens, int], Tokens]

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Tree]:
        found = self.proposer.propose(requests)
        for request, tree in zip(requests, found, strict=True):
            self.seen[tuple(request.state.tokens), tree.size] = tree.tokens
        return found

    def follow(
        self,
        step: Step,
        aux_hidden_states: Mapping[int, torch.Tensor],
        kept: Sequence[Kept],
        states: Sequence[SlotState],
        plain_steps: int = 0,
    ) -> None:
        self.proposer.follow(step, aux_hidden_states, kept, states, plain_steps)

    def catch_up(self, slot: int) -> None:
        self.proposer.catch_up(slot)

    def inherit_rows(self, source: int, target: int, state: SlotState) -> None:
        self.proposer.inherit_rows(source, target, state)


def never_right(draft: DraftModel | None) -> None:
    """From now on it does its work and says `NEVER`, the first of all tokens: with this norm all are equally likely."""
    assert isinstance(draft, DFlashDraft)
    with torch.inference_mode():
        draft._require_weights().norm.zero_()  # noqa: SLF001 - what was loaded is not for others to change


async def tier(options: Options, ends: Tokens, count: int) -> list[dict[str, Any]]:
    """Each prompt cold, from host memory, and from disk after a restart; every decode step as wide as can be."""
    asked = [prompt for group in prompts(list(NAMES), count, LONGEST).values() for prompt in group if len(prompt) > 128]
    jobs = [Job(prompt, 48, evolve(SAMPLED, seed=n) if n % 2 else Sampling(), ends) for n, prompt in enumerate(asked)]
    seen: dict[str, dict[tuple[Tokens, int], Tokens]] = {}
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        kept = evolve_options(options, kv_cache_dir=Path(folder), kv_cache_min_tokens=0, disk_prefix_cache="full")
        for names, budget in ((("cold", "host"), 2048), (("disk",), 0)):
            target = await load_target(evolve_options(kept, host_cache_budget=budget))
            proposer = target.executor.decoding.proposer  # to look over its shoulder
            assert proposer is not None
            for name in names:
                watched = WatchedProposer(proposer, {})
                target.executor = DeviceExecutor(evolve(target.executor.parts, proposer=watched))
                width = step_prices.round_up_to_bucket(1 + target.settings.max_proposals)
                flat = Rates(decode=(TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 1, width, 1001, 1000)))
                settings = evolve(target.settings, rates=flat)
                async with run_engine(settings, target.executor, transfer=target.transfer) as running:
                    answers = [await answer(running, job) for job in jobs]
                seen[name] = watched.seen
                rows.append({"tier": name, **compare_ways(seen["cold"], watched.seen, answers)})
            await target.close()
    return rows


def compare_ways(
    cold: Mapping[tuple[Tokens, int], Tokens], now: Mapping[tuple[Tokens, int], Tokens], answers: Sequence[TimedAnswer]
) -> dict[str, Any]:
    common = cold.keys() & now.keys()
    reports = [one.report for one in answers if one.report is not None]
    return {
        "restored": sum(report.restored_tokens for report in reports),
        "tok/round": round(sum(len(one.tokens) for one in answers) / sum(report.decode_steps for report in reports), 3),
        "proposals compared": len(common),
        "differing": sum(cold[key] != now[key] for key in common),
    }


# --- all of it ---

PARTS = ("speed", "limit", "acceptance", "tier", "steps", "residency")


async def measure(options: Options, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    parts = given.parts.split(",")
    if {"speed", "limit", "acceptance"} & set(parts):
        target = await load_target(evolve_options(options, disk_prefix_cache="off", host_cache_budget=0))
        found["rounds"] = target.settings.rates.decode
        text = Text.load(target.folder)
        ends = tuple(text.tokenizer.end_tokens)
        await text.aclose()
        if "speed" in parts:
            branching = await load_target(
                evolve_options(options, disk_prefix_cache="off", host_cache_budget=0, ddtree=True)
            )
            targets = {"plain": target, "chain": target, "tree": branching}
            found["speed"] = await speed(targets, ends, given.prompts, given.tokens)
            await branching.close()
        if "limit" in parts:
            found["limit"] = await limit(target, given.prompts)
        if "acceptance" in parts:
            found["acceptance"] = await acceptance(target, ends, given.prompts, given.tokens)
        await target.close()
    if "tier" in parts:
        found["tier"] = await tier(options, (), max(2, given.prompts // 2))
    return found


SPEED_GOALS = {("code", "greedy"): 1.6, ("code", "sampled"): 1.5}


def make_figures(found: dict[str, Any]) -> list[Figure]:
    """Make figures of speed over plain decoding, by subject and by forced acceptance."""
    made = list[Figure]()
    for row in found.get("speed", []):
        bound = SPEED_GOALS.get((row["subject"], row["sampling"]))
        goal, subject = None if bound is None else Goal(at_least=bound), f"demo with its draft, {row['sampling']}"
        made.append(Figure("speculation", subject, row["subject"], "x", row["chain x"], goal=goal))
    for row in found.get("steps", []):
        if row["what"].startswith("forced acceptance ") and "row" not in row["what"]:
            at, subject = row["what"].rpartition(" ")[2], "8B shape, forced acceptance"
            made.append(Figure("speculation", subject, at, "x", row["x plain"]))
    return made


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", default="speed,acceptance,tier", help="of " + ",".join(PARTS))
    parser.add_argument("--prompts", type=int, default=6, help="of each subject")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    options = build_options(model=given.model, draft=given.draft, device=given.device, threads=given.threads)
    found = anyio.run(measure, options, given)
    if {"steps", "residency"} & set(given.parts.split(",")):
        from benchmarks.speculation_8b import measure_8b  # noqa: PLC0415 - Triton comes with CUDA only

        found |= measure_8b(given.parts.split(","))
    for part, rows in found.items():
        if part != "rounds":
            print_table(part, rows)
    publish(given, "speculation", found, make_figures(found), given.device)


if __name__ == "__main__":
    main()
