"""Tests of speculation on the real demo models, in the real engine: the answer is the one that each gives alone, token
by token.

The demo's proposals come from a draft with random weights, which is hardly ever right, or from a guide that knows the
answer and errs now and then. So decode steps are cut everywhere. The hybrid demo's come from its own prediction head,
and a refused proposal rolls its recurrent states back.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
import torch
from attrs import define, evolve, field

from adapters import demo
from adapters.device.decode import decode_step, prefill_runner
from adapters.device.executor import DeviceExecutor
from adapters.device.speculation.proposal_tree import Tree, chain, to_depth_first
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.text.model_text import Text
from adapters.transfer import restorer
from benchmarks.exactness import prompts
from effects.decode import Logprob
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.ports import Closed
from effects.scope import Scope
from effects.stream import EmitTokens
from engine import __version__
from engine.core.trace import VERSION, Header, Recorder
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.re_execute import execute
from engine.serving.wiring import CompressionParts, Engine, StatusSources, run_engine
from engine.settings.options import build_options
from states.rates import Rates, TimedStep
from states.residency import resolve_residency
from tests.e2e.prepared import refused, serving
from tests.e2e.test_restart import kill, written
from tests.models.draft_models import FULL, random_tensors, save_draft
from tests.pairs import usual_where

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.95, seed=1),
    Sampling(temperature=1.1, top_k=40, min_p=0.02, seed=2, presence_penalty=0.4),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=3),
]
# Of however many requests: the widest decode steps are the best, on any machine.
FLAT = Rates(
    decode=tuple(TimedStep(0, members, rows, 1000 + (rows > 0), 0) for members in range(1, 9) for rows in (0, 128))
)
DRAFT = DFlashConfig(320, 832, 2, 5, 1, 64, Rotary(64, 1e6), (FULL,) * 2, (1, 4, 9), 8, 5)


@define(eq=False)
class Guided(Proposer):
    """Proposes what is known to come, spoilt here and there, while the real draft follows."""

    target: LoadedModel
    drafting: Proposer
    known: Sequence[Tokens]
    errors: random.Random
    right: float = 0.8
    branches: bool = False

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        return [self.proposal(request) for request in requests]

    def proposal(self, request: DraftRequest) -> Tree:
        so_far = tuple(request.state.tokens)
        coming = next((one[len(so_far) :] for one in self.known if one[: len(so_far)] == so_far), ())
        depth = min(request.most, request.depth)
        guess = [
            token if self.errors.random() < self.right else self.errors.randrange(4096) for token in coming[:depth]
        ]
        if not self.branches:
            return chain((so_far[-1], *guess))
        grown = [(node, token) for node, token in enumerate(guess)]
        for node, token in enumerate(coming[: max(0, request.most - len(grown))]):
            if node <= len(guess) and node < request.depth and (node, token) not in grown:
                grown.append((node, token))  # where the guess was wrong, the right token is its sibling
        return to_depth_first(so_far[-1], grown)

    def follow(self, *how) -> None:
        self.drafting.follow(*how)

    def catch_up(self, slot) -> None:
        self.drafting.catch_up(slot)

    def inherit_rows(self, *how) -> None:
        self.drafting.inherit_rows(*how)


@define(eq=False)
class WatchedDraft(Guided):
    """The draft's own proposals, written down."""

    seen: list[tuple[Tokens, ...]] = field(factory=list)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        found = list(self.drafting.propose(requests))
        self.seen += [(tuple(request.state.tokens), tree.tokens) for request, tree in zip(requests, found, strict=True)]
        return found


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(DRAFT).items()}
    save_draft(folder, DRAFT, tensors, num_target_layers=10, vocab_size=4096)
    return folder


SHAPE = {"device": "cpu", "max_ctx": 1024, "kv_cache_min_tokens": 64}
LENGTHS = {"demo": 24, "demo-hybrid": 40}  # of an answer
only_demo = pytest.mark.parametrize("model", ["demo"], indirect=True, scope="module")
only_hybrid = pytest.mark.parametrize("model", ["demo-hybrid"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=[*LENGTHS])
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def drafted(model, draft_folder) -> dict[str, object]:
    """Options for it with its draft."""
    return {**SHAPE, "model": model} | ({"draft": str(draft_folder)} if model == "demo" else {})


@pytest.fixture(scope="module")
async def target(drafted, tmp_path_factory) -> AsyncIterator[LoadedModel]:
    loaded = await load_target(
        build_options(kv_cache_dir=tmp_path_factory.mktemp("kv"), host_cache_budget=64, **drafted)
    )
    yield loaded
    await loaded.close()


@pytest.fixture(scope="module")
async def jobs(model, target) -> list[Job]:
    text = Text.load(target.folder)
    made = [prompt[-300:] for prompt in (await prompts(text, 16))[-6:]]
    await text.aclose()
    how = {"scope": Scope("off")}
    return [Job(prompt, LENGTHS[model], sampling=SAMPLINGS[n % 4], **how) for n, prompt in enumerate(made)]


@define
class Heard:
    tokens: Tokens = ()
    logprobs: tuple[Logprob, ...] = ()
    closed: Closed | None = None


async def hear_answer(running: Engine, job: Job) -> Heard:
    heard = Heard()
    async for message in running.submissions.submit(job):
        match message:
            case EmitTokens(tokens, logprobs):
                heard.tokens += tokens
                heard.logprobs += logprobs
            case Closed():
                heard.closed = message
            case _:
                pass
    return heard


@contextmanager
def timeless() -> Iterator[None]:
    """Let every step and load seem to take no time. So the same is proposed and restored whatever else the machine
    does.
    """
    with pytest.MonkeyPatch.context() as patch:
        for measuring in (decode_step, prefill_runner, restorer):
            patch.setattr(measuring, "time", SimpleNamespace(perf_counter_ns=lambda: 0))
        yield


async def answers(target: LoadedModel, jobs: Sequence[Job], *, at_once: int = 1, **settings) -> list[Heard]:
    found = [Heard()] * len(jobs)

    async def one(running: Engine, number: int) -> None:
        found[number] = await hear_answer(running, jobs[number])

    how = {"transfer": target.transfer, "compression": CompressionParts(target.scorer), "paranoid": True}
    changed = evolve(target.settings, **({"rates": FLAT} | settings))
    with timeless():
        async with run_engine(changed, target.executor, **how) as running:
            for start in range(0, len(jobs), at_once):
                async with anyio.create_task_group() as tasks:
                    for number in range(start, min(start + at_once, len(jobs))):
                        tasks.start_soon(one, running, number)
    return found


@pytest.fixture(scope="module")
async def plain(target, jobs) -> list[Heard]:
    """Every answer without a draft."""
    found = await answers(target, [evolve(job, speculate=False) for job in jobs])
    assert all(one.closed.report.proposed == 0 for one in found)
    return found


@pytest.fixture(autouse=True)
def whatever_the_time() -> Iterator[None]:
    with timeless():
        yield


@pytest.fixture
def guided(target, jobs, plain):
    """Take proposals from a guide that knows the plain answers, until the test is over."""
    drafting = target.executor.decoding.proposer  # the wiring of the real thing, but for who proposes
    known = [job.prompt + one.tokens for job, one in zip(jobs, plain, strict=True)]
    guide = Guided(target, drafting, known, random.Random(0))
    target.executor = DeviceExecutor(evolve(target.executor.parts, proposer=guide))
    yield guide
    target.executor = DeviceExecutor(evolve(target.executor.parts, proposer=drafting))


def words(found: Sequence[Heard]) -> list[tuple]:
    return [(one.tokens, one.logprobs, one.closed.finish) for one in found]


@only_demo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("branches", "at_once"), [(False, 1), (True, 4)], ids=["chains", "trees"])
async def test_tokens_and_logprobs_are_those_without_speculation(jobs, plain, guided, branches, at_once):
    guided.branches = branches
    found = await answers(guided.target, jobs, at_once=at_once, tree=15 if branches else 0)
    assert words(found) == words(plain)
    accepted = [one.closed.report.accepted for one in found]
    assert sum(accepted) > 2 * len(jobs)
    assert sum(accepted) < sum(one.closed.report.proposed for one in found)


# The hybrid's own head, which is often right. The demo's draft is hardly ever; the guide stands for it above.
@usual_where(lambda places: (places["model"], places["at_once"]) == (1, 0))
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at_once", [1, 4])
async def test_the_draft_of_the_model_changes_nothing_either(target, jobs, plain, at_once):
    found = await answers(target, jobs, at_once=at_once)
    assert words(found) == words(plain)
    accepted, proposed = (sum(getattr(one.closed.report, what) for one in found) for what in ("accepted", "proposed"))
    assert accepted < proposed
    assert accepted > 2 * len(jobs) or target.model_id == "demo", "a head that was trained for it is often right"


@only_hybrid
async def test_the_hybrid_is_served_as_a_demo_with_a_draft_of_its_own(target):
    assert target.model_id == "demo-hybrid"
    assert target.mode == "exact"
    assert (target.settings.stateful, target.settings.max_proposals, target.settings.keep_decoded) == (True, 7, True)
    assert target.build_ledger(0).models["draft"].device > 0


@only_demo
@pytest.mark.timeout(300)
async def test_an_answer_ends_at_every_limit_as_without_speculation(target, jobs, plain, guided):
    guided.right = 1.0
    for job, one in list(zip(jobs, plain, strict=True))[:2]:
        limits = range(1, len(one.tokens) + 1)
        found = await answers(target, [evolve(job, max_tokens=limit) for limit in limits])
        assert [each.tokens for each in found] == [one.tokens[:limit] for limit in limits]
        assert [each.logprobs for each in found] == [one.logprobs[:limit] for limit in limits]
        assert {each.closed.finish for each in found} == {"length"}
        assert max(each.closed.report.accepted for each in found) > len(one.tokens) // 2


@only_demo
@pytest.mark.timeout(300)
async def test_an_answer_ends_with_any_of_its_tokens_as_without_speculation(target, jobs, plain, guided):
    guided.right = 1.0
    for job, one in list(zip(jobs, plain, strict=True))[:2]:
        stops = list(dict.fromkeys(one.tokens))
        found = await answers(target, [evolve(job, stop_tokens=(stop,)) for stop in stops])
        assert [each.tokens for each in found] == [one.tokens[: one.tokens.index(stop) + 1] for stop in stops]
        assert {each.closed.finish for each in found} == {"stop"}


@only_demo
async def test_requests_that_need_no_draft_have_none(target, jobs, plain):
    for job, why in ((evolve(jobs[0], speculate=False), "declined"), (evolve(jobs[0], max_tokens=1), "one_token")):
        (one,) = await answers(target, [job])
        assert (one.closed.report.proposed, one.closed.report.speculation) == (0, why)
        assert one.tokens == plain[0].tokens[: job.max_tokens]


def moves(target: LoadedModel) -> dict[str, int]:
    """Bytes of the draft's weights."""
    held = target.build_ledger(0).models["draft"]
    return {"device": held.device, "host": held.host}


@only_demo
@pytest.mark.timeout(300)
async def test_a_request_scoped_draft_comes_and_goes_and_one_that_finds_no_room_is_done_without(
    target, jobs, plain, monkeypatch
):
    draft, scoped = target.draft, resolve_residency("request-scoped", has_draft=True, has_prompt_scorer=False)[0]
    weights = moves(target)["device"]
    await target.lane.run(draft.offload)
    assert moves(target) == {"device": 0, "host": weights if target.shard.spec.device.type == "cuda" else 0}
    how = {"status": StatusSources(live=target.collect_live), "paranoid": True}
    settings = evolve(target.settings, residency=scoped, rates=FLAT, store=False)
    async with run_engine(settings, target.executor, **how) as running:

        def shown() -> dict:
            return running.submissions.status().props.build_json()["runtime"]["draft_residency"]

        async def asked() -> Heard:
            heard = await hear_answer(running, jobs[0])
            with anyio.fail_after(20):
                await running.submissions.wait_until_empty()
            return heard

        assert (shown()["policy"], shown()["draft"]["state"]) == ("request-scoped", "parked")
        one = await asked()
        assert one.tokens == plain[0].tokens
        assert one.closed.report.proposed > 0
        after = shown()["draft"]
        assert (after["state"], after["device_bytes"], after["loads"], after["parks"]) == ("parked", 0, 1, 1)
        assert after["moved_bytes"] == 2 * weights

        def exhausted() -> int:
            raise torch.OutOfMemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(draft, "load_back", exhausted)
            one = await asked()
        assert one.tokens == plain[0].tokens
        assert one.closed.report.proposed == 0
        assert shown()["draft"]["last_error"] == "out_of_memory: no room"
        assert shown()["draft"]["state"] == draft.weights_state == "parked"
        one = await asked()
        assert one.tokens == plain[0].tokens
        assert one.closed.report.proposed > 0
    await target.lane.run(draft.load_back)
    assert moves(target)["device"] == weights


@only_demo
@pytest.mark.timeout(300)
@pytest.mark.parametrize("branches", [True, pytest.param(False, marks=pytest.mark.long)], ids=["trees", "chains"])
async def test_a_trace_with_speculation_is_executed_again_without_a_draft(target, jobs, guided, branches, tmp_path):
    guided.branches = branches
    trace = tmp_path / "trace.jsonl"
    settings = evolve(target.settings, rates=FLAT, tree=15 if branches else 0, store=False)
    header = Header(
        VERSION, __version__, settings, target.identity, {"device": target.shard.spec.device.type, "max_ctx": 1024}
    )
    recorder = Recorder(trace, header)
    recorder.start()
    async with run_engine(settings, target.executor, recorder=recorder) as running:
        found = list[Heard]()
        async with anyio.create_task_group() as tasks:
            for job in jobs:
                tasks.start_soon(keep, found, running, job)
        for job in jobs:  # left while their next decode step is on the device
            leaving = running.submissions.submit(evolve(job, max_tokens=60, stop_tokens=()))
            async for message in leaving:
                if isinstance(message, EmitTokens):
                    leaving.cancel("stop_string")
    assert sum(one.closed.report.accepted for one in found) > len(jobs)
    run, tokens = await execute(trace, "demo")
    assert run.is_complete
    assert tokens >= sum(len(one.tokens) for one in found)


async def keep(found: list[Heard], running: Engine, job: Job) -> None:
    found.append(await hear_answer(running, job))


@pytest.mark.parametrize(
    "model", [pytest.param("demo", marks=pytest.mark.long), "demo-hybrid"], indirect=True, scope="module"
)
@pytest.mark.timeout(300)
async def test_a_restored_prefix_is_proposed_the_same_tokens_as_a_cold_one(drafted, jobs, plain, tmp_path):
    """Cold, from host memory, and from disk after a restart: rows of target and draft, and recurrent states."""
    asked = [evolve(job, scope=Scope("full")) for job in jobs[:3]]
    seen, tiers = {}, {}
    for names, budget in ((("cold", "host"), 64), (("disk",), 0)):
        other = await load_target(build_options(kv_cache_dir=tmp_path, host_cache_budget=budget, **drafted))
        for name in names:
            watched = WatchedDraft(other, other.executor.decoding.proposer, (), random.Random())  # as in `guided`
            other.executor = DeviceExecutor(evolve(other.executor.parts, proposer=watched))
            rows = await answers(other, asked)
            other.executor = DeviceExecutor(evolve(other.executor.parts, proposer=watched.drafting))
            assert words(rows) == words(plain[:3])
            seen[name], tiers[name] = watched.seen, {one.closed.report.tier for one in rows}
        await other.close()
    assert tiers == {"cold": {"none"}, "host": {"host"}, "disk": {"disk"}}
    assert len(seen["cold"]) > 20
    assert seen["cold"] == seen["host"] == seen["disk"]


READER = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n" * 8
CODE = (
    "def total(items):\n    result = 0\n    for item in items:\n        result += item.price\n    return result\n\n\n"
)


@pytest.mark.timeout(300)
def test_a_server_tells_of_its_draft_and_ends_answers_where_it_would_without():
    """With the demo's own draft; a stop string ends anywhere in a block."""
    with serving("--lazy-draft", "--ddtree", "--max-ctx", "1024", "--paranoid") as server:
        props = server.client.get("/props").json()
        residency, models = props["runtime"]["draft_residency"], props["memory"]["models"]
        assert (residency["policy"], residency["draft"]["state"]) == ("request-scoped", "parked")
        assert (models["draft"]["device"], models["target"]["device"] > 0) == (0, True)
        assert (props["settings"]["max_proposals"], props["settings"]["tree"]) == (15, 22)
        assert props["rates_ns"]["decode"][0][:3] == [0, 1, 0]
        assert min(props["rates_ns"]["prefill"]) > 0
        body = {"max_tokens": 48, "temperature": 0, "logprobs": 1}
        answers = [server.complete(CODE, **body).json() for _ in range(4)]
        reports = [each["rekindle"]["speculation"] for each in answers]
        for report in reports:
            assert report["proposed"] >= report["accepted"]
            assert report["rounds"] + report["accepted"] >= 48, "every token was picked, or proposed and accepted"
            paid = report["why"] is None  # else the times of this moment were against it, and it is said so
            assert paid or report["why"] in {"never_pays", "does_not_pay", "loss_limit"}
            assert not paid or report["proposed"] > 0, "where nothing was against it, the draft is used"
        proposed, accepted = (sum(report[what] for report in reports) for what in ("proposed", "accepted"))
        assert proposed < 60 or accepted * 15 > proposed, "it is the draft of this very target"
        first = answers[0]
        text = first["choices"][0]["text"]
        for end in sorted({text[at : at + 3] for at in range(0, len(text) - 3, 40)}):
            both = [server.complete(CODE, **body, stop=end, speculation=how).json() for how in ("auto", "off")]
            assert both[0]["choices"] == both[1]["choices"], end
            assert both[0]["choices"][0]["text"] == text[: text.index(end)]
            assert both[1]["rekindle"]["speculation"]["proposed"] == 0
        assert server.client.get("/props").json()["runtime"]["draft_residency"]["draft"]["loads"] > 4
        assert server.stop() == 0


# By default `test_hybrid_turns.py` kills such a server, and the same prefixes are restored above.
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_hybrid_starts_warm_and_answers_as_before(tmp_path: Path):
    command = ("demo-hybrid", "--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "64", "--max-ctx", "1024")
    body = {"max_tokens": 32, "logprobs": 1}
    with serving(*command) as server:
        cold = [server.complete(READER, **body, temperature=warmth, seed=3).json() for warmth in (0, 0.8)]
        assert all(one["rekindle"]["speculation"]["why"] != "no_draft" for one in cold)
        written(server)
        kill(server)
    with serving(*command, trusting=True) as server:
        warm = [server.complete(READER, **body, temperature=warmth, seed=3).json() for warmth in (0, 0.8)]
        assert [one["choices"] for one in warm] == [one["choices"] for one in cold]
        assert (warm[0]["rekindle"]["tier"], warm[0]["rekindle"]["restored_tokens"] > 64) == ("disk", True)
        assert server.stop() == 0


REFUSED = {
    "no such folder": (("--draft", "/nowhere"), "--draft /nowhere: no such folder"),
    "a target": (("--draft", str(demo.FOLDER)), "tensor"),
    "no budget": (("--ddtree", "--ddtree-budget", "0"), "--ddtree-budget"),
    "a model without a head": (
        ("--draft", "mtp"),
        "--draft mtp: models of type 'qwen3' have no prediction head of their own; accepted: none, or the folder of a",
    ),
    "a draft of another": (
        ("demo-hybrid", "--draft", str(demo.FOLDER / "draft")),
        "hidden_size is 320, but the target has 160: a draft of another target",
    ),
    "no folder": (("demo-hybrid", "--draft", "mpt"), "--draft mpt: no such folder or file; accepted: a folder or GGUF"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", REFUSED)
def test_a_draft_that_cannot_be_used_is_told_in_one_line(case):
    given, message = REFUSED[case]
    assert message in refused("serve", "--port", "0", *given)
