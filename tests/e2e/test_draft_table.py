"""Every kind of draft in every place: the same tokens as without proposals after `kill -9`, with the target split over
processes, with the draft in a process of its own, with weights that come and go, and with rows that were kept.

docs/SPECULATION.md has the table. The tests are its cells. By default a server is killed. Other tests have drafts
beside a split target (`test_split.py`, `test_kinds_of_drafts.py`), drafts in a process of their own (`tests/remote`),
weights that come and go, and rows that were kept (`test_speculation.py`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import define, evolve, field, frozen

from adapters.device.decode.decode_step import DecodeRunner
from adapters.models.kernels.factory import build_text_matcher
from adapters.store.disk.disk_tier import DiskTier
from benchmarks import exactness
from benchmarks.exactness import Answered, together
from effects.decode import MATCH_CLASSES
from effects.ids import Tokens
from effects.job import Job
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from states.rates import ClassGains, Rates, TimedStep
from states.residency import resolve_residency
from states.speculation_control import list_widths
from states.suffix_control import list_copy_widths
from tests.e2e.prepared import forked
from tests.e2e.server import started
from tests.e2e.test_kinds_of_drafts import save
from tests.e2e.test_speculation import timeless

pytestmark = pytest.mark.skipif(build_text_matcher() is None, reason="there is no compiled library")
ANSWER = 24
# What `exactness.draw_prompts(8, 120)` returned once: drawing takes 7 s of processor time (Intel Xeon 2.8 GHz), and
# depends on what is installed.
PROMPTS = Path(__file__).with_name("drawn_prompts.json")
FULL = Scope("full")


@frozen
class DraftCase:
    """A kind of draft. saved: the name under which `test_kinds_of_drafts` makes one; empty: `draft` names it."""

    model: str = "demo"
    draft: str = "auto"
    saved: str = ""
    is_tree: bool = False

    @property
    def has_model(self) -> bool:
        return self.draft != "suffix"


KINDS = {
    "copies": DraftCase(draft="suffix"),
    "copies, trees": DraftCase(draft="suffix", is_tree=True),
    "copies, hybrid": DraftCase("demo-hybrid", draft="suffix"),
    "DFlash": DraftCase(),
    "DFlash, trees": DraftCase(is_tree=True),
    "DFlash 2": DraftCase(saved="DFlash 2"),
    "DSpark": DraftCase(saved="DSpark"),
    "GGUF": DraftCase(saved="GGUF"),
    "own head, hybrid": DraftCase("demo-hybrid"),
    "EAGLE-3": DraftCase(saved="EAGLE-3"),
    "EAGLE-3, trees": DraftCase(saved="EAGLE-3", is_tree=True),
    "EAGLE-3, hybrid": DraftCase("demo-hybrid", saved="EAGLE-3"),
}
PLACES: dict[str, dict[str, Any]] = {
    "here": {"device": "cpu"},
    "split": {"target_devices": "cpu:0,ipc+cpu:0"},
    "remote": {"device": "cpu", "draft_device": "ipc+cpu:0"},
}
WAYS = ("killed", "split", "remote", "parked", "kept")
QUICK = {("copies", "killed")}
CELLS = [
    pytest.param(kind, way, marks=() if (kind, way) in QUICK else pytest.mark.long)
    for kind, one in KINDS.items()
    for way in WAYS
    if one.has_model or way not in ("remote", "parked")
]


async def load(kind: DraftCase, folder: Path, place: str = "here") -> LoadedModel:
    draft = str(save(folder, kind.model, kind.saved)) if kind.saved else kind.draft
    trees = {"ddtree": True} if kind.is_tree and kind.has_model else {}
    shape = {"kv_cache_min_tokens": 0, "host_cache_budget": 0, "kv_cache_dir": folder / "kv", "max_ctx": 1024}
    return await load_target(build_options(model=kind.model, draft=draft, **PLACES[place], **shape, **trees))


def make_rates(target: LoadedModel, kind: DraftCase) -> Rates:
    """Rates by which proposals cost next to nothing and are nearly always right, so that they are always made."""
    settings = target.settings
    steps = [(members, rows) for members in (1, 2) for rows in (0, 128)]
    times = tuple(TimedStep(0, members, rows, 1000 + (rows > 0), 1000 if rows else 0) for members, rows in steps)
    copies = tuple(one for one in times if one.rows)
    gains = ClassGains(64, tuple(700 * width for width in list_copy_widths(settings)), 9000 if kind.is_tree else 0)
    return Rates(
        decode=times,
        gains=tuple(600 * width for width in list_widths(settings)),
        copied=(gains,) * len(MATCH_CLASSES),
        copy_times=copies,
        branch_times=copies if kind.is_tree else (),
    )


async def answer(
    target: LoadedModel, kind: DraftCase, jobs: Sequence[Job], *, at_once: int = 2, **settings: Any
) -> list[Answered]:
    changed = {"rates": make_rates(target, kind)} | settings
    if not kind.is_tree:
        changed |= {"max_branch": 0}
    with timeless():
        return await together(target, jobs, at_once=at_once, **changed)


def make_jobs() -> list[Job]:
    """Prompts that say everything twice, so that there is something to copy; greedy and sampled ones in turn."""
    drawn = [tuple(prompt) for prompt in json.loads(PROMPTS.read_text())]
    jobs = exactness.make_jobs(drawn, (), answer=ANSWER)[::2]
    return [evolve(job, prompt=job.prompt * 2) for job in jobs]


@cache
def give_plain_answers(model: str) -> tuple[Tokens, ...]:
    """Every answer cold, alone, and from a server that proposes nothing."""

    async def run() -> tuple[Tokens, ...]:
        options = build_options(model=model, draft="none", device="cpu", disk_prefix_cache="off", max_ctx=1024)
        target = await load_target(options)
        found = await together(target, make_jobs(), at_once=1)
        await target.close()
        return tuple(one.tokens for one in found)

    return anyio.run(run)


def tokens_of(found: Sequence[Answered]) -> tuple[Tokens, ...]:
    return tuple(one.tokens for one in found)


def total(found: Sequence[Answered], what: str) -> int:
    return sum(getattr(one.report, what) for one in found)


@define
class Verified:
    """Counts the proposals that were verified as chains and as trees."""

    chains: int = 0
    trees: int = 0
    patch: pytest.MonkeyPatch = field(factory=pytest.MonkeyPatch)

    def __attrs_post_init__(self) -> None:
        verify = DecodeRunner._verify  # noqa: SLF001 - every step with proposals that the library does not take

        def count(runner: DecodeRunner, members: Any, piece: Any) -> Any:
            trees = sum(one.tree.has_branches for one in members)
            self.trees += trees
            self.chains += sum(one.tree.size > 0 for one in members) - trees
            return verify(runner, members, piece)

        self.patch.setattr(DecodeRunner, "_verify", count)

    def forget(self) -> None:
        self.chains = self.trees = 0


@pytest.fixture
def verified() -> Iterator[Verified]:
    counted = Verified()
    yield counted
    counted.patch.undo()


async def leave(kind: str, folder: Path) -> None:
    """Answer, and be killed as soon as everything is on disk. It runs in a process of its own."""
    target = await load(KINDS[kind], folder)
    await answer(target, KINDS[kind], [evolve(job, scope=FULL) for job in make_jobs()])
    assert target.transfer is not None
    disk = target.transfer.store.find_tier(DiskTier)
    assert disk is not None
    while disk.queued_bytes:  # noqa: ASYNC110 - nothing reports it
        await anyio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed(kind: str, folder: Path) -> None:
    words = [sys.executable, "-m", "tests.e2e.test_draft_table", kind, str(folder)]
    with started(words, None, forked) as (process, errors):
        assert process.wait(200) == -signal.SIGKILL, errors


def main() -> None:
    anyio.run(leave, sys.argv[1], Path(sys.argv[2]))


async def run_cell(kind: DraftCase, way: str, folder: Path, verified: Verified) -> list[list[Answered]]:
    """Return answers that have to be the plain ones. Those before the last are what the last ones were kept from."""
    kept = [evolve(job, scope=FULL if way in ("killed", "kept") else Scope("off")) for job in make_jobs()]
    target = await load(kind, folder, way if way in PLACES else "here")
    verified.forget()  # the start has timed chains and trees
    try:
        if way == "parked":
            assert target.draft is not None
            residency, _ = resolve_residency("request-scoped", has_draft=True, has_prompt_scorer=False)
            await target.lane.run(target.draft.offload)
            found = await answer(target, kind, kept, residency=residency)
            assert target.draft.weights_state in {"parked", "released"}
            return [found]
        if way == "kept":  # one after the other, so that the same is proposed again
            return [await answer(target, kind, kept, at_once=1) for _ in range(2)]
        return [await answer(target, kind, kept)]
    finally:
        await target.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "way"), CELLS)
def test_answers_are_the_plain_ones(kind: str, way: str, tmp_path: Path, verified: Verified) -> None:
    one = KINDS[kind]
    plain = give_plain_answers(one.model)
    if way == "killed":
        be_killed(kind, tmp_path)
    runs = anyio.run(run_cell, one, way, tmp_path, verified)
    assert [tokens_of(found) for found in runs] == [plain] * len(runs)
    last = runs[-1]
    assert total(last, "proposed")
    assert total(last, "accepted") or one.saved, "a draft of random weights is hardly ever right"
    assert (total(last, "restored_tokens") > 0) == (way in ("killed", "kept"))
    assert (verified.trees > 0) == one.is_tree
    if way == "kept" and one.has_model:
        counts = [[(each.report.proposed, each.report.accepted) for each in found if each.report] for found in runs]
        assert counts[0] == counts[1], "the draft has its rows"


if __name__ == "__main__":
    main()
