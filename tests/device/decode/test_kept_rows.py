"""First tokens of prompts that went along: they are picked behind the prompt's last forward, with equal bits."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import anyio
import pytest
import torch

from adapters.device.decode import kept_rows
from adapters.device.sampling.sampler import LaunchedPicks
from effects.decode import Decoded
from effects.prefill import PrefillAdvanced
from tests.device.decode.test_prompt_along import STEPS, Outcomes, along, decode_step, open_decoding, open_prompts
from tests.device.driver import GREEDY, PENALISED, SAMPLED, Caller, Driver, drive, let_run_ahead, prompt_of, qwen3
from tests.device.fake_shard import FakeShard

SHORT = 9  # tokens of a prompt whose rows fit into one forward
MODELS = [FakeShard, qwen3, pytest.param(partial(qwen3, device="cuda"), marks=pytest.mark.cuda)]


@pytest.fixture(params=MODELS, ids=["fake", "cpu", "cuda"])
def shard(request):
    return request.param()


@pytest.fixture
def ahead(shard):
    driver = drive(shard)
    let_run_ahead(driver)
    yield driver
    assert driver.executor.close()


@contextmanager
def hold_reads(monkeypatch: pytest.MonkeyPatch):
    """Read no step before the returned event is set. So the core can ask for a step while another one is in flight."""
    go_on, read = threading.Event(), LaunchedPicks.read

    def wait_and_read(self):
        assert go_on.wait(60)
        return read(self)

    with monkeypatch.context() as patched:
        patched.setattr(LaunchedPicks, "read", wait_and_read)
        yield go_on


def count_forwards(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """Return a list that gets the segments of each forward: slot, first row, rows."""
    shard = driver.executor.parts.shard
    found, forward = list[list[tuple[int, int, int]]](), shard.forward

    def note(step, inputs):
        found.append([(one.slot, one.start, one.count) for one in step.segments])
        return forward(step, inputs)

    monkeypatch.setattr(shard, "forward", note)
    return found


async def ask_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, clients: list[Caller], prompts: list[Caller], steps: int
) -> Outcomes:
    """Let prompts go along, and ask for their first decode steps as soon as their rows are reported."""
    outcomes = Outcomes(driver)
    with hold_reads(monkeypatch) as go_on:
        outcomes.submit(*map(decode_step, clients), *map(along, prompts), callers=(*clients, *prompts))
        await outcomes.wait_for(*prompts)
        for prompt in prompts:
            assert outcomes.found[prompt.request] == [PrefillAdvanced(prompt.prompt - 1)]
        first_steps = [decode_step(prompt, steps) for prompt in prompts]
        outcomes.submit(*first_steps, callers=tuple(prompts), joins=True)
        go_on.set()
        await outcomes.wait_for(*prompts, *clients)
    return outcomes


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
async def test_the_first_token_takes_no_forward_and_has_the_bits_that_it_has_alone(ahead, sampling, monkeypatch):
    alone = await ahead.answer(prompt_of(80, SHORT), sampling, 4)
    theirs = await ahead.answer(prompt_of(60, 9), PENALISED, STEPS)
    clients = await open_decoding(ahead, (PENALISED,))
    [prompt] = [await ahead.open(prompt_of(80, SHORT), sampling, 2)]
    forwards = count_forwards(ahead, monkeypatch)
    outcomes = await ask_at_once(ahead, monkeypatch, clients, [prompt], 4)
    assert prompt.answer == alone
    assert clients[0].answer == theirs
    own = [segment for forward in forwards for segment in forward if segment[0] == 2]
    assert own == [(2, 0, SHORT), (2, SHORT, 1), (2, SHORT + 1, 1), (2, SHORT + 2, 1)]
    first = outcomes.found[prompt.request][0]
    assert isinstance(first, Decoded)
    assert first.ns == 0, "the time of the forward is not that of a decode step"


async def test_several_prompts_that_end_in_one_forward_get_their_first_tokens_behind_it(ahead, monkeypatch):
    lengths = (5, 7, 4)
    alone = [await ahead.answer(prompt_of(80 + number, length), SAMPLED, 6) for number, length in enumerate(lengths)]
    clients = await open_decoding(ahead, (GREEDY,))
    prompts = await open_prompts(ahead, lengths[:2])
    forwards = count_forwards(ahead, monkeypatch)
    await ask_at_once(ahead, monkeypatch, clients, prompts, 6)
    assert [one.answer for one in prompts] == alone[:2]
    assert forwards[0][1:] == [(1, 0, 5), (2, 0, 7)]
    following = next(forward for forward in forwards[1:] if len(forward) > 1)
    assert following[1:] == [(1, 5, 1), (2, 7, 1)], "the rows behind those of the prompts"


async def test_a_first_step_that_comes_late_is_picked_behind_the_forward_that_runs_then(ahead, monkeypatch):
    alone = await ahead.answer(prompt_of(80, SHORT), SAMPLED, 4)
    clients = await open_decoding(ahead, (GREEDY,))
    prompt = await ahead.open(prompt_of(80, SHORT), SAMPLED, 2)
    forwards = count_forwards(ahead, monkeypatch)
    reads, reached, go_on, read = list[int](), threading.Event(), threading.Event(), LaunchedPicks.read

    def hold_the_third(self):
        reads.append(len(forwards))
        if len(reads) == 3:
            reached.set()
            assert go_on.wait(60)
        return read(self)

    with monkeypatch.context() as patched:
        patched.setattr(LaunchedPicks, "read", hold_the_third)
        outcomes = Outcomes(ahead)
        outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
        await anyio.to_thread.run_sync(reached.wait)
        outcomes.submit(decode_step(prompt, 4), callers=(prompt,), joins=True)
        go_on.set()
        await outcomes.wait_for(prompt, *clients)
    assert prompt.answer == alone
    own = [number for number, forward in enumerate(forwards) if any(one[0] == 2 for one in forward)]
    assert own == [0, 3, 4, 5], "forwards 1 and 2 were launched before the step joined"


async def test_the_token_of_a_kept_row_comes_before_a_forward_that_prompts_go_along_with(ahead, monkeypatch):
    theirs = await ahead.answer(prompt_of(60, 9), GREEDY, STEPS)
    clients = await open_decoding(ahead, (GREEDY,))
    prompt = await ahead.open(prompt_of(80, SHORT), SAMPLED, 2)
    kept = clients[0].prompt - 1
    forwards = count_forwards(ahead, monkeypatch)
    outcomes = Outcomes(ahead)
    outcomes.submit(*map(decode_step, clients), along(prompt), callers=(*clients, prompt))
    await outcomes.wait_for(prompt, *clients)
    assert clients[0].answer == theirs
    assert forwards[0][0] == (0, kept + 1, 1), "the row that is kept is not computed again"
    assert forwards[0][1][0] == 2, "the prompt goes along with the next row"


async def test_a_first_token_that_ends_the_answer_leaves_the_others_alone(ahead, monkeypatch):
    [first, *_] = await ahead.answer(prompt_of(80, SHORT), GREEDY, 4)
    theirs = await ahead.answer(prompt_of(60, 9), GREEDY, STEPS)
    clients = await open_decoding(ahead, (GREEDY,))
    prompts = [
        await ahead.open(prompt_of(80, SHORT), GREEDY, 1, stops=(first,)),
        await ahead.open(prompt_of(80, 3), GREEDY, 2),
    ]
    forwards = count_forwards(ahead, monkeypatch)
    outcomes = Outcomes(ahead)
    with hold_reads(monkeypatch) as go_on:
        outcomes.submit(*map(decode_step, clients), *map(along, prompts), callers=(*clients, *prompts))
        await outcomes.wait_for(*prompts)
        outcomes.submit(decode_step(prompts[0], 4), decode_step(prompts[1], 1), callers=tuple(prompts), joins=True)
        go_on.set()
        await outcomes.wait_for(*prompts, *clients)
    assert prompts[0].answer == [first]
    assert len(prompts[1].answer) == 1
    assert clients[0].answer == theirs
    own = [segment for forward in forwards for segment in forward if segment[0] == 1]
    assert own == [(1, 0, SHORT), (1, SHORT, 1)], "the second one was launched before the first token was known"
    assert not any(one[0] == 2 for forward in forwards[1:] for one in forward), "it may have one token only"


def raise_out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


async def test_without_memory_for_the_pick_the_next_forward_computes_the_row_again(ahead, monkeypatch):
    alone = await ahead.answer(prompt_of(80, SHORT), SAMPLED, 4)
    clients = await open_decoding(ahead, (GREEDY,))
    prompt = await ahead.open(prompt_of(80, SHORT), SAMPLED, 2)
    forwards = count_forwards(ahead, monkeypatch)
    monkeypatch.setattr(kept_rows, "gather_kept_rows", raise_out_of_memory)
    await ask_at_once(ahead, monkeypatch, clients, [prompt], 4)
    assert prompt.answer == alone
    own = [segment for forward in forwards for segment in forward if segment[0] == 2]
    assert own[:2] == [(2, 0, SHORT), (2, SHORT - 1, 1)]
