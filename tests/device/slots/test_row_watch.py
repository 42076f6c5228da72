"""Tests of what `--paranoid` notices: rows that vanish or change, between requests and within one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
import torch

from adapters.device.decode.decode_step import DecodeRunner
from adapters.device.slots.row_watch import WINDOW, checksums
from adapters.models.decoder.cache.kv_cache import KvCache
from effects.all import Outcome
from effects.ids import PAGE, Tokens
from effects.job import Job
from effects.ports import Closed
from effects.stream import EmitTokens
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import build_options
from tests.models.checkpoints import save_qwen3

pytestmark = pytest.mark.usefixtures("rates_are_given")

PROMPT = tuple(10 + 7 * at % 140 for at in range(300))


@pytest.fixture
async def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_qwen3(tmp_path / "model", max_position_embeddings=1024)
    how = {"disk_prefix_cache": "off", "host_cache_budget": 0, "chunk": 64, "device": "cpu"}
    loaded = await load_target(
        build_options(model=str(tmp_path / "model"), slots=2, max_ctx=1024, kv_memory=1, draft="none", **how)
    )
    yield loaded
    await loaded.close()


async def answer(running: Engine, job: Job) -> tuple[Tokens, str]:
    tokens: Tokens = ()
    async for message in running.submissions.submit(job):
        if isinstance(message, EmitTokens):
            tokens += message.tokens
        elif isinstance(message, Closed):
            return tokens, message.finish
    raise AssertionError("its stream has no end")


def spoil(target: LoadedModel, slot: int, change: str) -> None:
    """Change a row as a fault of the memory would."""
    with torch.inference_mode():
        rows = target.shard.parts[0].rows.view(slot, 70, 200)
        if change == "zeros":
            rows.zero_()
        elif change == "one bit":
            rows[1, 0, 1, 4, :1].view(torch.uint8)[3] ^= 1
        else:
            rows.copy_(rows.flip(-2).clone())


def noticed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("paranoid: ")]


@pytest.mark.parametrize("change", ["zeros", "one bit", "moved"])
async def test_rows_that_change_between_two_requests_are_noticed_and_computed_again(
    target: LoadedModel, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(PROMPT, 20)
    async with run_engine(target.settings, target.executor, paranoid=True) as running:
        right = await answer(running, job)
        assert await answer(running, job) == right
        assert not noticed(caplog)
        spoil(target, 0, change)
        assert await answer(running, job) == right
        assert len(noticed(caplog)) == 1
        assert "slot 0: " in noticed(caplog)[0]
        assert "are not what they were when they were written" in noticed(caplog)[0]


async def test_without_the_option_nobody_looks(target: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(PROMPT, 20)
    async with run_engine(target.settings, target.executor) as running:
        right = await answer(running, job)
        spoil(target, 0, "zeros")
        assert await answer(running, job) != right
    assert not noticed(caplog)


async def test_rows_that_vanish_while_an_answer_is_generated_are_noticed_before_they_are_read(
    target: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, steps, step = Job(PROMPT, 60), 0, DecodeRunner.step

    def spoiling(decoding: DecodeRunner, *asked: Any, **rules: Any) -> tuple[Outcome, ...]:
        nonlocal steps
        outcomes = step(decoding, *asked, **rules)
        steps += 1
        if steps == 10:
            for slot in (0, 1):
                spoil(target, slot, "zeros")
        return outcomes

    async with run_engine(target.settings, target.executor) as running:
        right = await answer(running, job)
    monkeypatch.setattr(DecodeRunner, "step", spoiling)
    async with run_engine(target.settings, target.executor, paranoid=True) as running:
        assert await answer(running, job) == right
    assert steps > 10
    assert len(noticed(caplog)) == 1


class Forgetful(KvCache):
    """A cache with a fault of the past: a slot's old pages stay its own when it is given others."""

    def _permit(self, slot: int, first: int, pages: Sequence[int]) -> list[tuple[int, int]]:
        lost = []
        for number, page in enumerate(pages, first):
            before = self._pieces.get(page, (slot, number))
            lost += [before] * (before != (slot, number))
            self._pieces[page] = slot, number
        self._counts[slot] = first + len(pages)
        return lost


async def test_memory_that_a_pool_gives_back_too_early_is_noticed_and_no_token_is_wrong(
    target: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, heads = Random(4), [tuple(10 + (7 + at) * n % 140 for n in range(3 * PAGE)) for at in range(4)]
    # No sequence is longer than the watch's window, so each launch looks at all of its rows.
    assert WINDOW >= 490 + 1 + 12
    jobs = [Job((*random.choice(heads)[: random.choice((200, 300, 490))], 11 + number % 3), 12) for number in range(60)]
    right = dict[Tokens, tuple[Tokens, str]]()
    async with run_engine(target.settings, target.executor) as running:
        for job in jobs:
            right[job.prompt] = await answer(running, job)
    monkeypatch.setattr(KvCache, "_permit", Forgetful._permit)  # noqa: SLF001 - the fault is put back
    finishes = list[str]()

    async def client(mine: Sequence[Job]) -> None:
        for job in mine:
            tokens, finish = await answer(running, job)
            assert tokens == right[job.prompt][0][: len(tokens)], "no client gets a token that rows of zeros gave"
            assert finish in {"length", "lost"}, "rows may be lost once while a request is served, not twice"
            finishes.append(finish)

    async with (
        run_engine(target.settings, target.executor, paranoid=True) as running,
        anyio.create_task_group() as tasks,
    ):
        for at in range(3):
            tasks.start_soon(client, jobs[at::3])
    assert noticed(caplog)
    assert finishes.count("length") > len(jobs) / 2


def test_a_checksum_is_of_every_bit_of_a_row_in_every_layer_whatever_the_width() -> None:
    for width, dtype in ((16, torch.bfloat16), (20, torch.int8), (24, torch.float32)):
        rows = {f"layers.{n}.k": torch.ones(2, 3, width).to(dtype) for n in range(2)}
        before = checksums(rows)
        assert before.shape == (3,)
        for tensor in rows.values():
            for head in range(2):
                tensor[head, 1].view(torch.uint8)[-1] ^= 128
                after = checksums(rows)
                assert (after != before).tolist() == [False, True, False]
                tensor[head, 1].view(torch.uint8)[-1] ^= 128
        assert torch.equal(checksums(rows), before)
