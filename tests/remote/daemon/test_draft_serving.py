"""The demos with drafts in another process: the same answers whatever becomes of that, and what is kept is right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest
from attrs import define, evolve

from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.protocol.messages import Op
from effects.job import Job, Sampling
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from tests.e2e.test_speculation import FLAT, Heard, answers, words
from tests.pairs import usual_where
from tests.remote.daemon.test_faults import made, on_threads
from tests.remote.daemons import Fates, Threads

SHAPE = {"device": "cpu", "max_ctx": 512, "kv_cache_min_tokens": 64, "slots": 2, "host_cache_budget": 0}
SHAPE |= {"kv_cache_interval": 64}


@define(eq=False)
class DraftedTarget:
    target: LoadedModel
    fates: Fates
    jobs: Sequence[Job]
    plain: Sequence[tuple]

    @property
    def draft(self) -> RemoteDraft:
        assert isinstance(self.target.draft, RemoteDraft)
        return self.target.draft

    async def right(self, **how) -> list[Heard]:
        heard = await answers(self.target, self.jobs, rates=FLAT, **how)
        assert words(heard) == self.plain
        return heard

    async def right_each(self, count: int, **how) -> None:
        """The first `count` jobs one after the other, each once the draft is there again: what is kept without its rows
        stays so.
        """
        for job, plain in zip(self.jobs[:count], self.plain[:count], strict=True):
            assert words(await answers(self.target, [job], rates=FLAT, **how)) == [plain]
            await self.back()

    async def back(self) -> None:
        """There again, if it was lost."""
        await anyio.to_thread.run_sync(self.draft.wait, 100)
        assert self.draft.weights_state != "lost"


@pytest.fixture(scope="module", params=["demo", "demo-hybrid"])
async def undrafted(request) -> tuple[str, Sequence[Job], Sequence[tuple]]:
    """A model, jobs, and what it answers without a draft."""
    jobs = [evolve(job, speculate=True, max_tokens=16) for job in await made(request.param, 4)]
    whole = await load_target(build_options(model=request.param, **SHAPE, draft="none", disk_prefix_cache="off"))
    plain = words(await answers(whole, [evolve(job, scope=Scope("off")) for job in jobs], rates=FLAT))
    await whole.close()
    return request.param, jobs, plain


@pytest.fixture
async def serving(undrafted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DraftedTarget]:
    model, jobs, plain = undrafted
    fates, dials = Fates(), list[Threads]()
    on_threads(monkeypatch, fates, dials)
    target = await load_target(build_options(model=model, **SHAPE, draft_device="ipc+cpu:0", kv_cache_dir=tmp_path))
    found = DraftedTarget(target, fates, jobs, plain)
    found.draft.peer.pause_s = 0
    yield found
    await target.close()
    assert all(not thread.is_alive() for dial in dials for thread in dial.threads), "nothing is left running"


def proposed(heard: Sequence[Heard]) -> list[int]:
    return [one.closed.report.proposed for one in heard if one.closed is not None]


def reasons(heard: Sequence[Heard]) -> list[str]:
    return [one.closed.report.speculation for one in heard if one.closed is not None]


@pytest.mark.timeout(600)
@usual_where(lambda places: places["undrafted"] == 1)
async def test_no_seed_that_a_request_may_have_ends_the_draft(serving: DraftedTarget) -> None:
    """Half of all seeds that are drawn where a request has none are 2**62 and more."""
    for seed, top_k in (((1 << 62) + 1, 0), ((1 << 63) - 1, 1 << 31)):
        sampling = Sampling(temperature=0.8, seed=seed, top_k=top_k)
        heard = await answers(serving.target, [evolve(job, sampling=sampling) for job in serving.jobs], rates=FLAT)
        assert all(proposed(heard))
        assert not any(reasons(heard))
    assert serving.draft.weights_state == "loaded"
    assert (serving.draft.peer.restarts, serving.draft.peer.error) == (0, "")


# The hybrid has rows, states and a draft.
@usual_where(lambda places: places["undrafted"] == 1)
@pytest.mark.timeout(600)
async def test_answers_are_the_same_whatever_becomes_of_the_draft(serving: DraftedTarget) -> None:
    cold = await serving.right()
    assert all(proposed(cold))
    again = await serving.right()  # restored, the draft's rows, too
    assert all(proposed(again))
    assert serving.fates.seen[Op.EXPORT_ROWS]
    serving.fates.gate.clear()  # it does not come back before the gate opens
    serving.fates.coming[:] = [(Op.DRAFT_STEP, "answering", 1)]
    without = await serving.right(at_once=2)
    assert serving.draft.weights_state == "lost"
    assert reasons(without)[-1] == "draft_lost"
    assert not proposed(without)[-1]
    assert serving.target.build_ledger(0).draft.error == "the other end has closed the connection"
    serving.fates.gate.set()
    await serving.back()
    anew = await serving.right()  # what was kept of its rows is right
    assert all(proposed(anew))
    assert not any(reasons(anew))
    draft = serving.target.build_ledger(0).draft
    assert (draft.restarts, draft.error) == (1, ""), "what is over is no error any more"


@pytest.mark.timeout(600)
@usual_where(lambda places: places["undrafted"] == 1)
async def test_a_draft_that_dies_while_its_rows_or_weights_move_costs_nothing_else(serving: DraftedTarget) -> None:
    scoped = evolve(serving.target.settings.residency, policy="request-scoped", draft="park")
    serving.draft.offload()
    for op in (Op.EXPORT_ROWS, Op.IMPORT_ROWS, Op.FETCH_DRAFT, Op.SEND_DRAFT_AWAY):
        serving.fates.coming[:] = [(op, "asked", 0)]
        for _ in range(2):  # what is kept by the first is loaded by the second
            await serving.right_each(2, residency=scoped)
        assert op in serving.fates.died
    last = await serving.right(residency=scoped)
    assert all(proposed(last))
    assert serving.draft.weights_state == "parked"
