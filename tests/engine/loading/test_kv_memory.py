"""Rows in a pool of a size that was asked for: served on a CPU with more sessions than it holds at once."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import anyio
import pytest
import torch
from attrs import evolve

from adapters.remote.client.peer import Peer
from effects.ids import PAGE, Tokens
from effects.job import Job
from effects.ports import Closed
from effects.stream import EmitTokens
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.loading.memory.device_survey import Placement
from engine.loading.memory.memory_fit import DeviceNeed, Fit, fit_page_pool, with_spare_slots
from engine.loading.memory_estimate import compute_fit
from engine.serving.announce import describe_costs
from engine.serving.wiring import run_engine
from engine.settings.options import build_options
from engine.settings.output.formatting import format_bytes
from engine.settings.user_error import UserError
from tests.models.checkpoints import save_qwen3

pytestmark = pytest.mark.usefixtures("rates_are_given")

GIB, KIB = 1 << 30, 1 << 10
# As an 8B model in bfloat16: 16.4 GB of weights, 144 KiB a token.
FIXED, ROW, LIMIT = 16_381_470_720, 144 * KIB, 40960


@pytest.fixture(autouse=True)
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("gib", "asked", "fit"),
    [
        (400, {}, Fit(64, LIMIT)),  # whole slots
        (120, {"slots": 16}, Fit(16, LIMIT)),
        (120, {}, Fit(64, LIMIT, pages=2979)),
        (80, {}, Fit(64, LIMIT, pages=1841)),
        (52, {}, Fit(64, LIMIT, pages=1045)),
        (33, {}, Fit(64, LIMIT, pages=504)),
        (22, {}, Fit(64, LIMIT, pages=191)),
        (18, {}, Fit(32, 16384, pages=78)),  # 64 slots would have fewer than two pages each
        (120, {"memory": 8 * GIB}, Fit(64, LIMIT, pages=227)),
        (22, {"slots": 3, "context": 1000}, Fit(3, 1000)),
        (22, {"slots": 3, "context": 1000, "memory": GIB}, Fit(3, 1000, pages=12)),  # all that the slots could use
        (22, {"memory": 1000 << 20}, Fit(16, 6144, pages=27)),
        (22, {"memory": 1000 << 20, "context": LIMIT}, Fit(16, 27 * PAGE, pages=27)),
        (10, {}, Fit(1, 1024, fits=False, pages=4)),
    ],
)
def test_a_pool_is_what_is_left_or_what_was_asked_for(gib: float, asked: dict[str, int], fit: Fit) -> None:
    assert fit_page_pool([DeviceNeed("cuda:0", int(gib * GIB), FIXED, ROW)], LIMIT, **asked) == fit


@pytest.mark.parametrize(
    ("state_mib", "draft_kib", "slots"),
    [
        (147, 0, 64),  # 9.2 GiB of states, of 66 GiB
        (300, 0, 32),
        (600, 0, 16),
        (0, 6, 64),
        (0, 12, 32),
        (0, 30, 16),
    ],
)
def test_many_slots_have_little_for_themselves(state_mib: int, draft_kib: int, slots: int) -> None:
    need = DeviceNeed("cuda:0", 120 * GIB, 54 * GIB, (48 + draft_kib) * KIB, state_mib << 20, own=draft_kib * KIB)
    found = fit_page_pool([need], 32768)
    assert found.slots == slots
    assert need.compute_taken(found) <= need.available


@pytest.mark.parametrize(("state_mib", "slots"), [(30, 64), (40, 32), (70, 16)])
def test_slots_of_a_small_pool_have_little_beside_it(state_mib: int, slots: int) -> None:
    need = DeviceNeed("cuda:0", 120 * GIB, 16 * GIB, 144 * KIB, state_mib << 20)
    assert fit_page_pool([need], 40960, memory=8 * GIB).slots == slots


@pytest.mark.parametrize(("slots", "spare"), [(64, 16), (6, 2), (1, 1)])
def test_slots_that_need_no_memory_of_their_own_have_a_spare_one_for_every_four(slots: int, spare: int) -> None:
    need = DeviceNeed("cuda:0", 120 * GIB, 54 * GIB, 144 * KIB)
    fit = Fit(slots, 32768, pages=1000)
    assert with_spare_slots(fit, [need]) == evolve(fit, spare=spare)
    for own in ({"state": 1 << 20}, {"own": 6 * KIB}):
        assert with_spare_slots(fit, [need, evolve(need, **own)]) == fit
    assert with_spare_slots(Fit(slots, 32768), [need]) == Fit(slots, 32768), "there are no pages"


def test_a_draft_that_takes_much_leaves_whole_slots_where_they_fit() -> None:
    need = DeviceNeed("cuda:0", 120 * GIB, FIXED, ROW, own=40 * KIB)
    assert fit_page_pool([need], LIMIT) == Fit(16, LIMIT)


def test_what_a_draft_keeps_is_charged_for_every_slot() -> None:
    need = DeviceNeed("cuda:0", 40 * GIB, FIXED, ROW + 20 * KIB, own=20 * KIB)
    fit = fit_page_pool([need], LIMIT)
    assert (fit.slots, fit.context) == (16, LIMIT)
    assert need.compute_taken(fit) == FIXED + 16 * LIMIT * 20 * KIB + fit.pages * PAGE * ROW <= need.available


async def answers(target: LoadedModel, jobs: list[Job], *, together: bool) -> list[tuple[Tokens, str]]:
    answers = list[tuple[Tokens, str]]([((), "")] * len(jobs))

    async def one(number: int) -> None:
        tokens: Tokens = ()
        async for message in running.submissions.submit(jobs[number]):
            if isinstance(message, EmitTokens):
                tokens += message.tokens
            elif isinstance(message, Closed):
                answers[number] = tokens, message.finish

    async with run_engine(target.settings, target.executor, paranoid=True) as running:
        if together:
            async with anyio.create_task_group() as tasks:
                for number in range(len(jobs)):
                    tasks.start_soon(one, number)
        else:
            for number in range(len(jobs)):
                await one(number)
    return answers


async def test_more_sessions_than_the_pool_holds_are_all_answered_as_if_each_was_alone(tmp_path: Path) -> None:
    save_qwen3(tmp_path / "model", max_position_embeddings=1024)
    how = {"disk_prefix_cache": "off", "host_cache_budget": 0, "chunk": 64, "device": "cpu"}
    options = build_options(model=str(tmp_path / "model"), slots=4, max_ctx=1024, kv_memory=1, **how)
    target = await load_target(options)
    try:
        settings, token = target.settings, target.shard.rows.spec.token_bytes
        weights = format_bytes(target.shard.memory()["weights"])
        cost = f"weights=float32 (32.0 bits, {weights})  context={format_bytes(token)} a token"
        assert describe_costs(target) == f"  {cost}"
        assert settings.pages == min((1 << 20) // (PAGE * token), 16)
        assert settings.max_context == min(1024, settings.pages * PAGE)
        assert target.build_ledger(0).slots["target"] == settings.pages * PAGE * token <= 1 << 20
        head = tuple(10 + number % 140 for number in range(settings.max_context // 3))
        jobs = [Job((*head, *(11 + number,) * 40), 60) for number in range(6)]
        alone = await answers(target, jobs, together=False)
        assert await answers(target, jobs, together=True) == alone
        assert {finish for _, finish in alone} == {"length"}
    finally:
        await target.close()


def test_slots_of_other_processes_have_no_pool() -> None:
    elsewhere = Placement(range(3), torch.device("cpu"), peer=cast(Peer, object()))
    with pytest.raises(UserError, match="--kv-memory does not work with shards in other processes"):
        compute_fit(build_options(kv_memory=100).runtime, [], 512, [elsewhere])
