"""The hybrid demo with its own prediction head, in the real engine: same answers with it and without, and restarted."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import evolve

from adapters import demo
from adapters.text.text import Text
from benchmarks.exactness import prompts
from effects.job import Job
from effects.scope import Scope
from engine.begin import load_target
from engine.options import Options
from engine.target import Target
from tests.e2e.server import refused, serving
from tests.e2e.test_restart import kill, written
from tests.e2e.test_speculation import FLAT, SAMPLINGS, Heard, WatchedDraft, answers, words

LENGTH = 40
CODE = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n" * 8


@pytest.fixture(scope="module")
async def target(tmp_path_factory) -> AsyncIterator[Target]:
    shape = {"device": "cpu", "max_ctx": 1024, "kv_cache_dir": tmp_path_factory.mktemp("kv"), "host_cache_budget": 64}
    loaded = await load_target(Options(model="demo-hybrid", kv_cache_min_tokens=64, **shape))
    yield loaded
    await loaded.close()


@pytest.fixture(scope="module")
async def jobs(target) -> list[Job]:
    text = Text.load(target.folder)
    made = [prompt[-300:] for prompt in (await prompts(text, 16))[-8:]]
    await text.aclose()
    return [Job(prompt, LENGTH, sampling=SAMPLINGS[n % 4], scope=Scope("off")) for n, prompt in enumerate(made)]


@pytest.fixture(scope="module")
async def plain(target, jobs) -> list[Heard]:
    return await answers(target, [evolve(job, speculate=False) for job in jobs])


async def test_it_is_served_as_a_demo_with_a_draft_of_its_own(target):
    assert target.model_id == "demo-hybrid"
    assert target.numerics_shown["mode"] == "exact"
    assert (target.settings.stateful, target.settings.block, target.settings.keep_decoded) == (True, 7, True)
    assert target.memory(0)["models"]["draft"]["device"] > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("at_once", [1, 4])
async def test_tokens_and_logprobs_are_those_without_its_head(target, jobs, plain, at_once):
    """Greedy, sampled and penalised; every rejection rolls the recurrent state back."""
    found = await answers(target, jobs, at_once=at_once)
    assert words(found) == words(plain)
    reports = [one.closed.report for one in found]
    assert sum(one.accepted for one in reports) > 2 * len(jobs)
    assert sum(one.accepted for one in reports) < sum(one.proposed for one in reports)


@pytest.mark.timeout(180)
async def test_restored_it_says_and_proposes_the_same_as_cold(jobs, plain, tmp_path):
    """From host memory, and from disk after a restart: rows of target and head, and the recurrent state."""
    asked = [evolve(job, scope=Scope("full")) for job in jobs[:4]]
    shape = {"device": "cpu", "max_ctx": 1024, "kv_cache_dir": tmp_path, "kv_cache_min_tokens": 64}
    seen, tiers = {}, {}
    for names, budget in ((("cold", "host"), 64), (("disk",), 0)):
        other = await load_target(Options(model="demo-hybrid", host_cache_budget=budget, **shape))
        for name in names:
            watched = WatchedDraft(other, other.executor._proposer, (), random.Random())  # noqa: SLF001 - its wiring
            other.executor.proposed_to(watched)
            rows = await answers(other, asked, rates=FLAT)
            other.executor.proposed_to(watched.drafting)
            assert words(rows) == words(plain[:4])
            seen[name], tiers[name] = watched.seen, {one.closed.report.tier for one in rows}
        await other.close()
    assert tiers == {"cold": {"none"}, "host": {"host"}, "disk": {"disk"}}
    assert len(seen["cold"]) > 20
    assert seen["cold"] == seen["host"] == seen["disk"]


@pytest.mark.timeout(120)
def test_killed_it_starts_warm_and_answers_as_before(tmp_path: Path):
    command = ("demo-hybrid", "--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "64", "--max-ctx", "1024")
    body = {"max_tokens": 32, "logprobs": 1}
    with serving(*command) as server:
        cold = [server.complete(CODE, **body, temperature=warmth, seed=3).json() for warmth in (0, 0.8)]
        told = [one["rekindle"]["speculation"] for one in cold]
        assert all(one["why"] != "no_draft" for one in told)
        written(server)
        kill(server)
    with serving(*command) as server:
        warm = [server.complete(CODE, **body, temperature=warmth, seed=3).json() for warmth in (0, 0.8)]
        assert [one["choices"] for one in warm] == [one["choices"] for one in cold]
        assert (warm[0]["rekindle"]["tier"], warm[0]["rekindle"]["restored_tokens"] > 64) == ("disk", True)
        assert server.stop() == 0


REFUSED = {
    "a model without a head": (
        ("--draft", "mtp"),
        "--draft mtp: models of type 'qwen3' have no prediction head of their own; accepted: none, or the folder of a",
    ),
    "a draft of another": (
        ("demo-hybrid", "--draft", str(demo.FOLDER / "draft")),
        "hidden_size is 320, but the target has 160: a draft of another target",
    ),
    "no folder": (("demo-hybrid", "--draft", "mpt"), "--draft mpt: no such folder; accepted: one with a DFlash draft"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", REFUSED)
def test_a_draft_that_cannot_be_is_refused_by_name(case):
    given, message = REFUSED[case]
    assert message in refused("serve", "--port", "0", *given)
