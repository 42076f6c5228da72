"""A drafter on the executor's lane, and on one of its own: pieces, residency, failures, and what is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
import torch

from adapters.device.compression.score_prompt import Compressor, PromptScorerLane, build_token_marks
from adapters.device.compression.select_tokens import TokenMarks
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.scorer import TAIL as QUERIES
from adapters.models.decoder.scorer import Scorer
from adapters.models.numerics.synthetic import RandomWeights
from effects.all import EffectRequest, Launch, Outcome
from effects.compression import PromptPart, count_tokens
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId
from effects.ports import LaunchFailed
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from engine.loading.load_scorer import LoadedScorer
from tests.device.driver import BUCKETS, CHUNK, TINY, VOCAB, Driver, drive
from tests.device.fake_shard import FakeShard
from tests.models.checkpoints import proven

ONE, TWO = RequestId(101), RequestId(102)
PROMPT = tuple((7 * at * at + 3 * at) % (VOCAB - 1) + 1 for at in range(300))
FIRST = CompressPrompt(0, PROMPT, keep=100, most=250)
MARKS = TokenMarks(b"", b"", frozenset((0,)))


def compressor() -> Compressor:
    weights, kernels = RandomWeights(TINY, scale=0.2), proven(TINY, torch.float32, 512, BUCKETS)
    scorer = Scorer(TINY, weights, kernels.copy_for_shard(), torch.device("cpu"), torch.float32, BUCKETS, 512)
    return Compressor(scorer, MARKS)


@pytest.fixture
def drafter() -> Compressor:
    return compressor()


@pytest.fixture
def driver(drafter: Compressor) -> Any:
    handlers = {CompressPrompt: drafter.compress, LoadModel: drafter.load, UnloadModel: drafter.unload}
    driver = drive(FakeShard(), handlers=handlers)
    yield driver
    assert driver.executor.close()


async def compressed(driver: Driver, first: CompressPrompt = FIRST, request: RequestId = ONE) -> tuple[list[int], Any]:
    """Return the end of each scored piece, and the last outcome."""
    stops, effect = list[int](), first
    while True:
        (outcome,) = await driver.perform(EffectRequest(request, effect))
        if not isinstance(outcome, PromptScored):
            return stops, outcome
        stops.append(outcome.stop)
        effect = CompressPrompt(outcome.stop)


async def test_a_prompt_is_scored_in_as_many_pieces_as_it_has_chunks(driver: Driver, drafter: Compressor) -> None:
    (loaded,) = await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    assert isinstance(loaded, ModelLoaded)
    assert (loaded.name, loaded.bytes) == ("scorer", drafter.weights_bytes[0])
    stops, outcome = await compressed(driver)
    assert stops == list(range(CHUNK, len(PROMPT), CHUNK))
    assert isinstance(outcome, PromptCompressed)
    assert 0 < len(outcome.prompt) <= 100
    assert outcome.prompt == tuple(token for start, stop in outcome.kept for token in PROMPT[start:stop])
    assert outcome.kept[-1][1] == len(PROMPT), "the end is always kept"
    assert drafter.buffers == 0, "nothing stays behind"
    assert (await compressed(driver))[1] == outcome
    (gone,) = await driver.perform(EffectRequest(ONE, UnloadModel("scorer", keep=False)))
    assert isinstance(gone, ModelUnloaded)
    assert drafter.weights_bytes == (0, 0)


async def test_a_neighbour_decodes_between_the_pieces_and_both_are_as_if_alone(driver: Driver) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    _, alone = await compressed(driver)
    quiet = await driver.answer(PROMPT[:40], slot=1)
    neighbour = await driver.open(PROMPT[:40], slot=1)
    await neighbour.prefill((CHUNK,))
    effect, outcome = FIRST, None
    while not isinstance(outcome, PromptCompressed):
        (outcome,) = await driver.perform(EffectRequest(ONE, effect))
        (step,) = await driver.decode(neighbour)
        assert isinstance(step, Decoded)
        effect = CompressPrompt(getattr(outcome, "stop", 0))
    assert outcome == alone
    assert neighbour.answer[: len(quiet)] == quiet[: len(neighbour.answer)]


async def test_two_prompts_are_scored_in_turns(driver: Driver) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    other = CompressPrompt(0, PROMPT[:200], keep=90, most=90)
    alone = (await compressed(driver))[1], (await compressed(driver, other, TWO))[1]
    waiting, found = {ONE: FIRST, TWO: other}, dict[RequestId, Outcome]()
    while waiting:
        for request, effect in list(waiting.items()):
            (outcome,) = await driver.perform(EffectRequest(request, effect))
            if isinstance(outcome, PromptScored):
                waiting[request] = CompressPrompt(outcome.stop)
            else:
                found[request] = outcome
                del waiting[request]
    assert (found[ONE], found[TWO]) == alone


@pytest.mark.parametrize("count", [1, QUERIES - 1])
async def test_a_prompt_too_short_to_be_scored_stays_as_it_is(driver: Driver, count: int) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    _, outcome = await compressed(driver, CompressPrompt(0, PROMPT[:count], keep=1, most=250))
    assert outcome.prompt == PROMPT[:count]


async def test_what_may_not_be_dropped_and_does_not_fit_leaves_the_prompt_as_it_is(driver: Driver) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    _, outcome = await compressed(driver, CompressPrompt(0, (0,) * 200, keep=20, most=100))
    assert outcome.prompt == (0,) * 200


async def test_work_out_of_turn_is_refused_with_a_reason(driver: Driver) -> None:
    (outcome,) = await driver.perform(EffectRequest(ONE, FIRST))
    assert outcome == DeviceFailed("broken", "the scorer is not loaded")
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    (outcome,) = await driver.perform(EffectRequest(ONE, CompressPrompt(64)))
    assert outcome == DeviceFailed("broken", f"nothing of request {ONE} was scored before token 64")


async def test_who_is_given_up_leaves_nothing_behind(driver: Driver, drafter: Compressor) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    await driver.perform(EffectRequest(ONE, FIRST))
    assert drafter.buffers > 0
    LoadedScorer(None, drafter, driver.executor._lane).abandon(ONE)  # noqa: SLF001
    (outcome,) = await driver.perform(EffectRequest(ONE, CompressPrompt(CHUNK)))
    assert isinstance(outcome, DeviceFailed)
    assert drafter.buffers == 0


async def test_a_drafter_without_memory_fails_one_request_and_serves_the_next(
    driver: Driver, drafter: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    begin: Callable[..., Any] = Scorer.begin

    def full(scorer: Scorer, tokens: tuple[int, ...]) -> Any:
        if len(tokens) > 250:
            raise torch.OutOfMemoryError("no room")
        return begin(scorer, tokens)

    monkeypatch.setattr(Scorer, "begin", full)
    assert await compressed(driver) == ([], DeviceFailed("out_of_memory", "no room"))
    _, outcome = await compressed(driver, CompressPrompt(0, PROMPT[:200], keep=90, most=90))
    assert isinstance(outcome, PromptCompressed)


async def test_a_drafter_that_cannot_be_read_fails_and_is_tried_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> Any:
        raise OSError("model.safetensors: gone")

    with monkeypatch.context() as patched:
        patched.setattr(RandomWeights, "read", missing)
        (outcome,) = await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
        assert outcome == DeviceFailed("io", "model.safetensors: gone")
    (outcome,) = await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    assert isinstance(outcome, ModelLoaded)


@pytest.fixture
async def scorer_lane(drafter: Compressor) -> AsyncIterator[PromptScorerLane]:
    lane = PromptScorerLane(drafter, DeviceLane("cpu"))
    yield lane
    assert lane.close()
    assert drafter.weights_bytes == (0, 0)


async def asked(lane: PromptScorerLane, effect: Any, request: RequestId = ONE) -> Any:
    done, heard = anyio.Event(), list[Any]()

    def settle(result: Any) -> None:
        heard.append(result)
        done.set()

    lane.submit(Launch((EffectRequest(request, effect),)), settle)
    await done.wait()
    if isinstance(heard[0], LaunchFailed):
        assert heard[0].requests == (request,)
        return heard[0].error
    [(whose, outcome)] = heard[0]
    assert whose == request
    return outcome


async def test_a_lane_of_its_own_answers_the_same(scorer_lane: PromptScorerLane, driver: Driver) -> None:
    assert isinstance(await asked(scorer_lane, LoadModel("scorer")), ModelLoaded)
    _, wanted = await compressed(driver)
    outcome = await asked(scorer_lane, FIRST)
    while isinstance(outcome, PromptScored):
        outcome = await asked(scorer_lane, CompressPrompt(outcome.stop))
    assert (outcome.prompt, outcome.kept) == (wanted.prompt, wanted.kept)
    assert isinstance(await asked(scorer_lane, UnloadModel("scorer", keep=False)), ModelUnloaded)


async def test_a_lane_of_its_own_forgets_and_fails_as_the_other(
    scorer_lane: PromptScorerLane, drafter: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asked(scorer_lane, LoadModel("scorer"))
    await asked(scorer_lane, FIRST)
    scorer_lane.abandon(ONE)
    assert isinstance(await asked(scorer_lane, CompressPrompt(CHUNK)), DeviceFailed)
    assert drafter.buffers == 0
    assert isinstance(await asked(scorer_lane, 7), LookupError)

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Scorer, "begin", full)
    assert await asked(scorer_lane, FIRST) == DeviceFailed("out_of_memory", "no room")


def test_marks_are_read_off_the_pieces() -> None:
    marks = build_token_marks([b"a", b".\n", b" \n\n  ", b"end. ", b"?", b"", "。".encode()], frozenset((5,)))
    assert [at for at in range(7) if marks.has_mark(at, marks.lines)] == [1, 2]
    assert [at for at in range(7) if marks.has_mark(at, marks.sentences)] == [1, 3, 4, 6]
    assert not marks.has_mark(99, marks.lines)


AGED = (PromptPart("user", 20, 120, keep=200), PromptPart("assistant", 120, 180, keep=500))


async def test_messages_are_shortened_one_by_one_each_to_its_own_ratio(driver: Driver) -> None:
    """Pieces of neighbours' length, one parking window; nothing between the messages is looked at."""
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    stops, made = await compressed(driver, CompressPrompt(0, PROMPT, parts=AGED, apart=True))
    assert isinstance(made, PromptCompressed)
    assert made.prompt == ()
    assert stops, "messages take turns with what others ask for"
    for part in AGED:
        mine = [span for span in made.kept if part.start <= span[0] and span[1] <= part.stop]
        length = part.stop - part.start
        assert 0 < count_tokens(mine) <= length * part.keep // 1000 + 8
        assert mine[-1][1] == part.stop, "what closes it"
    assert all(any(part.start <= start < stop <= part.stop for part in AGED) for start, stop in made.kept)


async def test_what_a_message_is_shortened_to_does_not_depend_on_what_is_around_it(driver: Driver) -> None:
    await driver.perform(EffectRequest(ONE, LoadModel("scorer")))
    _, both = await compressed(driver, CompressPrompt(0, PROMPT, parts=AGED, apart=True))
    text, (_, later) = PROMPT[120:180], AGED
    alone = CompressPrompt(0, text, parts=(PromptPart("assistant", 0, 60, keep=later.keep),), apart=True)
    _, one = await compressed(driver, alone)
    assert [(start - 120, stop - 120) for start, stop in both.kept if start >= 120] == list(one.kept)
