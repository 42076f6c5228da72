"""Shards that die, wherever that is: a clear error or the same answer, the next one right, nothing kept that is not."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from attrs import define, evolve

import engine
import engine.loading.shard_peers
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.daemon.answer_handlers import OpAnswer
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.protocol.channel import Channel
from adapters.remote.protocol.lent_memory import LentTensors
from adapters.remote.protocol.messages import Op, Unacceptable
from adapters.remote.protocol.slot_messages import ImportRuns
from adapters.text.model_text import Text
from adapters.transfer import saver
from adapters.transfer.copy_rows import CudaEvents, record_cuda_events
from benchmarks.exactness import prompts
from effects.job import Job
from effects.ports import RowsLost
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.loading.shard_server import ServedModel
from engine.settings.options import build_options
from engine.settings.paths import choose_draft_name, find_model_folder
from tests.e2e.test_speculation import FLAT, SAMPLINGS, Heard, answers, words
from tests.pairs import usual_where, with_first
from tests.remote.daemons import Fates, Mortal, Threads

MODELS = ("demo", "demo-hybrid")
KILLS = 3  # of each model, in the default suite
MANY_KILLS = 1000  # of each
PLAN = {"target_devices": "cpu:0,ipc+cpu:0", "target_layer_split": "1,1"}
SHAPE = {"max_ctx": 512, "kv_cache_min_tokens": 64, "host_cache_budget": 0, "draft": "none", "slots": 2}
SHAPE |= {"kv_cache_interval": 64}
ENDINGS = {"stop", "length"}


@define(eq=False)
class Split:
    """A target of which half is on threads, and what one that is not answers."""

    target: LoadedModel
    fates: Fates
    jobs: Sequence[Job]
    plain: Sequence[tuple]

    @property
    def shard(self) -> RemoteShard:
        shard = self.target.shard.parts[1]
        assert isinstance(shard, RemoteShard)
        return shard


def on_threads(monkeypatch: pytest.MonkeyPatch, fates: Fates, dials: list[Threads]) -> None:
    """Let the server find on threads what it would launch as processes."""

    def launched(where, options, folder, secret, lender) -> Threads:
        def meddle(channel: Channel) -> Channel:
            assert fates.gate.wait(100)
            return Mortal(channel.socket, doom=fates.doom)

        served = ServedModel.open(
            str(folder), where.device, choose_draft_name(options.speculation.draft, options.model.model)
        )
        dials.append(Threads(served, True, secret.encode(), engine.__version__, where.name, meddle, lender))
        return dials[-1]

    monkeypatch.setattr(engine.loading.shard_peers, "build_launch", launched)


async def made(model: str, count: int) -> list[Job]:
    text = Text.load(find_model_folder(build_options(model=model).model))
    found = [prompt[-150:] for prompt in (await prompts(text, 8 + count))[8:]]
    await text.aclose()
    return [Job(prompt, 8, sampling=SAMPLINGS[n % 4], speculate=False) for n, prompt in enumerate(found)]


@pytest.fixture(scope="module", params=MODELS)
async def unbroken(request) -> tuple[str, Sequence[Job], Sequence[tuple]]:
    """A model, jobs, and what it answers where nothing dies."""
    jobs = await made(request.param, 6)
    whole = await load_target(build_options(model=request.param, device="cpu", **SHAPE, disk_prefix_cache="off"))
    plain = words(await answers(whole, [evolve(job, scope=Scope("off")) for job in jobs], rates=FLAT))
    await whole.close()
    return request.param, jobs, plain


@pytest.fixture
async def split(unbroken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Split]:
    model, jobs, plain = unbroken
    fates, dials = Fates(), list[Threads]()
    on_threads(monkeypatch, fates, dials)
    target = await load_target(build_options(model=model, **PLAN, **SHAPE, kv_cache_dir=tmp_path))
    found = Split(target, fates, jobs, plain)
    found.shard.peer.pause_s = 0
    yield found
    for _ in range(2):  # as often as anybody likes
        await target.close()
    assert all(not thread.is_alive() for dial in dials for thread in dial.threads), "nothing is left running"


def right(split: Split, numbers: Sequence[int], heard: Sequence[Heard]) -> int:
    """Return how many requests were answered. The others must say why they were not."""
    for number, one in zip(numbers, heard, strict=True):
        assert one.closed is not None
        if one.closed.finish in ENDINGS:
            assert words([one]) == [split.plain[number]], number
        else:
            assert one.closed.finish == "lost"
            assert "ipc+cpu:0" in one.closed.detail or "lost a second time" in one.closed.detail, one.closed.detail
            assert one.tokens == split.plain[number][0][: len(one.tokens)]
    return sum(one.closed.finish in ENDINGS for one in heard if one.closed is not None)


async def killed(split: Split, seeds: Sequence[int]) -> Counter[Op]:
    """One death or two for each seed, while two prompts are answered; then the same again, undisturbed."""
    for seed in seeds:
        draw = random.Random(seed)
        numbers = draw.sample(range(len(split.jobs)), 2)
        salts = draw.choice(("", str(seed))), ""  # of a new salt, nothing is kept yet
        jobs = [evolve(split.jobs[number], salt=salt) for number, salt in zip(numbers, salts, strict=True)]
        ops = [one for one in Op if split.fates.seen[one]]
        split.fates.coming[:] = [
            (draw.choice((None, *ops)), draw.choice(("asked", "answering")), draw.choice((0, 0, 1, 3)))
            for _ in range(draw.choice((1, 1, 2)))
        ]
        if not split.fates.died:  # whatever else is asked for, this is
            split.fates.coming[0] = Op.FORWARD, "asked", 0
        at_once = draw.choice((1, 2))
        heard = await answers(split.target, jobs, at_once=at_once, rates=FLAT)
        right(split, numbers, heard)
        split.fates.coming.clear()
        again = await answers(split.target, jobs, rates=FLAT)
        assert right(split, numbers, again) == 2, (seed, [one.closed for one in again])
    return Counter(split.fates.died)


# The hybrid has everything that a restart brings back: rows, states, and a draft.
@usual_where(lambda places: MODELS[places["unbroken"]] == "demo-hybrid")
@pytest.mark.timeout(180)
async def test_a_shard_that_is_killed_changes_no_answer(split: Split) -> None:
    assert right(split, range(6), await answers(split.target, split.jobs, rates=FLAT)) == 6
    died = await killed(split, range(KILLS))
    assert died[Op.FORWARD]
    assert right(split, range(6), await answers(split.target, split.jobs, rates=FLAT)) == 6, "what was kept was right"


@usual_where(lambda places: (places["unbroken"], places["how"]) in {(0, 0), (1, 1)})
@pytest.mark.parametrize("how", ["asked", "answering", "refused"])
async def test_rows_that_nobody_waited_for_and_that_were_never_put_change_no_answer(
    split: Split, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the restore is reported before the rows are there. The next call says that all rows are lost, and they
    are restored once more, by another process.
    """
    await answers(split.target, split.jobs, rates=FLAT)
    put, refused = ServedLayers.ops[Op.IMPORT_RUNS][1], list[Op]()

    def refusing(served: ServedLayers, asked: ImportRuns, given: LentTensors) -> OpAnswer:
        if not refused:
            refused.append(Op.IMPORT_RUNS)
            raise Unacceptable("not now")
        return put(served, asked, given)

    if how == "refused":
        monkeypatch.setitem(ServedLayers.ops, Op.IMPORT_RUNS, (ImportRuns, refusing))
    else:
        split.fates.coming[:] = [(Op.IMPORT_RUNS, how, 0)]
    before = split.fates.seen[Op.IMPORT_RUNS]
    heard = await answers(split.target, split.jobs[:2], at_once=1, rates=FLAT)
    assert right(split, [0, 1], heard) == 2
    assert split.shard.peer.restarts == (how != "refused"), "a refusal ends no process"
    assert [*refused, *split.fates.died] == [Op.IMPORT_RUNS]
    assert split.fates.seen[Op.IMPORT_RUNS] > before + 1, "the same again"
    assert all(one.closed is not None and one.closed.report.restored_tokens for one in heard)


@with_first("unbroken")
async def test_of_a_shard_that_is_had_anew_no_rows_are_kept_for_those_that_were_lost(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies behind the word that its slot has them, and is there again before they are taken."""

    def lost(devices: Iterable[torch.device]) -> CudaEvents:
        """Take the place of what the lane records, once the rows have been found."""
        split.shard.peer.dial.kill()  # type: ignore[attr-defined] # a `Threads`
        with pytest.raises(RowsLost):
            split.shard.rows.copy(0, 1, 1)
        split.shard.rows.copy(0, 1, 1)
        return record_cuda_events(devices)

    with monkeypatch.context() as patched:
        patched.setattr(saver, "record_cuda_events", lost)
        assert right(split, [0], await answers(split.target, split.jobs[:1], rates=FLAT)) == 1
    assert split.shard.peer.restarts == 1
    (again,) = await answers(split.target, split.jobs[:1], rates=FLAT)
    assert right(split, [0], [again]) == 1
    assert again.closed is not None
    assert not again.closed.report.restored_tokens, "nothing is kept"


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_a_thousand_kills_change_no_answer(split: Split) -> None:
    """`killed` compares the answers of every round with those of an undisturbed server."""
    await answers(split.target, split.jobs, rates=FLAT)
    seeds = itertools.count(100)
    while len(split.fates.died) < MANY_KILLS:
        await killed(split, [next(seeds)])
