"""Tests of targets over several devices, here the same one several times: tokens, logits and proposals are those of one
device, cold, after a restart, and whichever of them kept what is restored.
"""

from __future__ import annotations

import random
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, evolve

from adapters.device.executor import DeviceExecutor
from adapters.text.model_text import Text
from benchmarks.exactness import prompts
from benchmarks.listening import Listening
from effects.decode import Logprob
from effects.job import Job
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from engine.settings.paths import find_model_folder
from tests.e2e.prepared import refused, serving
from tests.e2e.test_restart import kill, written
from tests.e2e.test_speculation import FLAT, SAMPLINGS, Heard, WatchedDraft, answers, words
from tests.pairs import usual_where

PLANS: dict[str, dict[str, Any]] = {
    "one": {"device": "cpu"},
    "two": {"target_devices": "cpu:0,cpu:0"},
    "three": {"target_devices": "cpu:0,cpu:0,cpu:0", "target_layer_split": "0.2,0.5,0.3"},
}
GPUS: dict[str, dict[str, Any]] = {
    "one": {"device": "cuda:0"},
    "two": {"target_devices": "cuda:0,cuda:1"},
    "processes": {"target_devices": "cuda:0,ipc+cuda:1"},
}
# Everybody restores what everybody has kept.
STARTS = ("one", "two", "three", "process", "process", "three", "two", "one")
MODELS = ("demo", "demo-hybrid")
HUNDREDS, PIECES = 200, 10  # prompts of each plan's own, and tests that share them


@define
class Rounds:
    """The results of some jobs, one after the other."""

    words: list[tuple[Any, tuple[Logprob, ...], Any]]  # tokens, log-probabilities, finish
    rows: list[tuple[int, str]]
    proposals: list[Any]
    tiers: set[str]

    @property
    def said(self) -> tuple[list[Any], list[tuple[int, str]]]:
        """Return what has to be equal."""
        return self.words, self.rows


async def answer_all(target: LoadedModel, listening: Listening, jobs: Sequence[Job]) -> Rounds:
    watched = WatchedDraft(target, target.executor.decoding.proposer, (), random.Random())  # its wiring
    target.executor = DeviceExecutor(evolve(target.executor.parts, proposer=watched))
    listening.attach()
    heard: list[Heard] = await answers(target, jobs, rates=FLAT)
    target.executor = DeviceExecutor(evolve(target.executor.parts, proposer=watched.drafting))
    tiers = {one.closed.report.tier for one in heard if one.closed is not None}
    return Rounds(words(heard), listening.taken(), watched.seen, tiers)


async def compare(
    model: str,
    folder: Path,
    count: int,
    length: int,
    starts: Sequence[str],
    *,
    plans: Mapping[str, dict[str, Any]] = PLANS,
    steady: bool = True,
    skip: int = 0,
) -> set[tuple[str, str]]:
    """Every plan answers `count` prompts of its own cold, half of them speculated, and restores those of all before it,
    once each. Which pairs did.

    steady: what a step takes decides nothing, so the same is proposed again. skip: prompts that others had.
    """
    text = Text.load(find_model_folder(build_options(model=model).model))
    made = [prompt[-300:] for prompt in (await prompts(text, skip + 8 + count * len(plans)))[skip + 8 :]]
    await text.aclose()
    how = [{"sampling": SAMPLINGS[n % 4], "speculate": (n + n // 4) % 2 == 0} for n in range(len(made))]
    every = [Job(prompt, length, **each) for prompt, each in zip(made, how, strict=True)]
    own = {plan: every[number * count :][:count] for number, plan in enumerate(plans)}
    plain, cold = dict[str, Rounds](), dict[str, Rounds]()
    pairs = set[tuple[str, str]]()
    for plan in starts:
        shape = {"max_ctx": 1024, "kv_cache_dir": folder, "kv_cache_min_tokens": 64, "host_cache_budget": 0}
        options = build_options(model=model, **plans[plan], **shape)
        target = await load_target(options)
        assert len(target.shard.parts) == len(options.placement.locations)
        assert target.transfer is not None
        target.transfer.saver.clock_ns = lambda: 0  # what takes longer than 2 s to be kept is kept without draft's rows
        listening = Listening(target)
        for name in own if not plain else ():
            alone = [evolve(job, speculate=False, scope=Scope("off")) for job in own[name]]
            plain[name] = await answer_all(target, listening, alone)
        for name in [name for name in cold if (name, plan) not in pairs]:
            found = await answer_all(target, listening, own[name])
            assert "disk" in found.tiers, "what a busy machine would rather compute is as right"
            assert found.said == plain[name].said, (name, plan)
            assert found.proposals == cold[name].proposals if steady else found.proposals, "the draft has its rows"
            pairs.add((name, plan))
        if plan not in cold:
            cold[plan] = found = await answer_all(target, listening, own[plan])
            assert found.tiers == {"none"}
            assert found.said == plain[plan].said, plan
            assert len(found.proposals) >= count // 2
        assert not target.transfer.store.dropped_rows
        assert not target.transfer.store.dropped_draft_rows, "what is kept is all that the draft has"
        await target.close()
    return pairs


# The hybrid has rows and states.
@usual_where(lambda places: MODELS[places["model"]] == "demo-hybrid")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
async def test_every_plan_answers_alike_and_restores_what_others_have_kept(model: str, tmp_path: Path) -> None:
    pairs = await compare(model, tmp_path, 2, 12, STARTS[:3])
    assert pairs == {("one", "two"), ("one", "three"), ("two", "three")}


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("piece", range(PIECES))
async def test_every_plan_restores_what_each_has_kept_over_hundreds_of_prompts(
    model: str, piece: int, tmp_path: Path
) -> None:
    """The prompts come in pieces, so that these may run side by side, or one after the other for as long as there is
    time.
    """
    remote = {"target_devices": "cpu:0,ipc+cpu:0", "target_shard_ipc_python": another_interpreter(tmp_path / "venv")}
    plans, count = PLANS | {"process": remote}, HUNDREDS // PIECES
    pairs = await compare(model, tmp_path, count, 32, STARTS, plans=plans, skip=piece * count * len(plans))
    assert pairs == {(one, other) for one in plans for other in plans}


def another_interpreter(folder: Path) -> Path:
    """Return the interpreter of an environment of its own, which finds this one's libraries and our packages by a path
    file.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (found,) = folder.glob("lib/python*/site-packages")
    (found / "other.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path(__file__).parents[2]}\n")
    return folder / "bin/python"


@pytest.mark.cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
async def test_two_gpus_answer_as_one_does_in_one_process_and_in_two(model: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    pairs = await compare(model, tmp_path, 2, 12, tuple(GPUS), plans=GPUS, steady=False)
    assert pairs == {("one", "two"), ("one", "processes"), ("two", "processes")}


# By default `test_remote_shard.py` looks at such a plan, and above restores what other plans have kept.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_split_server_shows_its_plan_and_what_it_kept_is_restored_without_one(tmp_path: Path) -> None:
    words = ("demo-hybrid", "--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "64", "--max-ctx", "1024")
    code = "class Reader:\n    def __init__(self, path):\n        self.path = path\n" * 8
    body: dict[str, Any] = {"prompt": code, "max_tokens": 16, "temperature": 0.8, "seed": 3, "logprobs": 2}
    with serving(*words, "--target-devices", "cpu:0,cpu:0", "--target-layer-split", "1,3") as server:
        assert "  layers=0-1@cpu,2-7@cpu  " in server.lines[0]
        cold = server.complete(**body).json()
        first, second = server.client.get("/props").json()["memory"]["shards"]
        assert (first["layers"], second["layers"]) == ([0, 2], [2, 8])
        assert (first["device"], second["device"]) == ("cpu", "cpu")
        whole = server.client.get("/props").json()["memory"]
        assert first["bytes"]["weights"] + second["bytes"]["weights"] == whole["models"]["target"]["device"]
        assert first["bytes"]["kv"] + second["bytes"]["kv"] == whole["slots"]["target"]
        written(server)
        kill(server)
    with serving(*words, trusting=True) as server:
        assert "  layers=0-7@cpu  " in server.lines[0]
        warm = server.complete(**body).json()
        assert warm["choices"] == cold["choices"]
        assert (warm["rekindle"]["tier"], warm["rekindle"]["restored_tokens"] > 64) == ("disk", True)
        assert server.stop() == 0


@pytest.mark.timeout(300)
def test_more_shards_than_layers_are_refused_at_start() -> None:
    said = refused("serve", "demo-hybrid", "--port", "0", "--target-devices", ",".join(["cpu"] * 9))
    assert "9 shards for 8 layers; accepted: at most one for each layer" in said
