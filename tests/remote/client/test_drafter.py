"""A drafter in another process scores as one here does, and what becomes of that process is a failure as any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attrs import define, evolve, field

from adapters.device.compression.score_prompt import Compressor
from adapters.device.compression.select_tokens import TokenMarks
from adapters.models.decoder.scorer import Scorer
from adapters.models.numerics.synthetic import RandomWeights
from adapters.remote.client.remote_scorer import SCORER_DEADLINES, RemoteScorer, build_scorer_request
from adapters.remote.protocol.draft_messages import DraftMoved
from adapters.remote.protocol.messages import Nothing, Op
from adapters.remote.protocol.payload_tensors import describe_tensors
from adapters.remote.protocol.scorer_messages import MOST_SCORINGS, PromptAdvanced, ScorePrompt
from effects.compression import Compression, PromptPart
from effects.ids import DeviceFailed, RequestId
from effects.job import Job
from effects.prompt_compression import CompressPrompt, PromptCompressed, PromptScored
from effects.residency import LoadModel, ModelLoaded, UnloadModel
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from tests.device.driver import TINY, VOCAB
from tests.e2e.test_speculation import FLAT, answers, words
from tests.models.checkpoints import proven
from tests.remote.daemon.test_faults import made, on_threads
from tests.remote.daemons import BUCKETS, Fates, Mortal, RandomModel, Threads, peer_of

ONE, TWO = RequestId(1), RequestId(2)
MOST = 512
PROMPT = tuple((7 * at * at + 3 * at) % (VOCAB - 1) + 1 for at in range(300))
ASKED = CompressPrompt(0, PROMPT, keep=100, most=250)
AGED = (PromptPart("user", 20, 120, keep=200), PromptPart("assistant", 120, 180, keep=500))
MESSAGES = CompressPrompt(0, PROMPT, parts=AGED, apart=True)
MARKS, LOAD = TokenMarks(b"", b"", frozenset((0,))), LoadModel("scorer")


def here() -> Compressor:
    kernels = proven(TINY, torch.bfloat16, MOST, BUCKETS).copy_for_shard()
    weights = RandomWeights(TINY, scale=TINY.hidden_size**-0.5)
    return Compressor(Scorer(TINY, weights, kernels, torch.device("cpu"), torch.bfloat16, BUCKETS, MOST), MARKS)


@define(eq=False)
class ScoredElsewhere:
    fates: Fates = field(factory=Fates)
    dial: Threads = field(init=False)
    compressor: Compressor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.dial = Threads(RandomModel(TINY), meddle=lambda channel: Mortal(channel.socket, doom=self.fates.doom))
        peer = peer_of(self.dial, SCORER_DEADLINES)
        peer.pause_s = 0
        peer.connect()
        self.compressor = Compressor(RemoteScorer(peer, build_scorer_request(MOST, fast=False)), MARKS)

    @property
    def scorer(self) -> RemoteScorer:
        assert isinstance(self.compressor.scorer, RemoteScorer)
        return self.compressor.scorer


@pytest.fixture
def elsewhere() -> Iterator[ScoredElsewhere]:
    found = ScoredElsewhere()
    yield found
    found.scorer.peer.close()


def compressed(compressor: Compressor, asked: CompressPrompt = ASKED, request: RequestId = ONE) -> tuple[int, object]:
    """Return how many turns the compression took, and its result, with its time set to 0."""
    turns, done = 1, compressor.compress(request, asked)
    while isinstance(done, PromptScored):
        turns, done = turns + 1, compressor.compress(request, CompressPrompt(done.stop))
    return turns, evolve(done, ns=0) if isinstance(done, PromptCompressed) else done


def test_what_is_left_of_a_prompt_is_the_same(elsewhere: ScoredElsewhere) -> None:
    one, other = here(), elsewhere.compressor
    for compressor in (one, other):
        assert isinstance(compressor.load(ONE, LOAD), ModelLoaded)
    assert other.weights_bytes == one.weights_bytes
    turns, done = compressed(one)
    assert isinstance(done, PromptCompressed)
    assert compressed(other) == (turns, done)
    assert compressed(other, MESSAGES)[1] == compressed(one, MESSAGES)[1]
    first = other.compress(ONE, ASKED)  # another one's prompt in between
    assert isinstance(first, PromptScored)
    assert other.buffers
    assert compressed(other, MESSAGES, TWO)[1] == compressed(one, MESSAGES)[1]
    assert compressed(other, CompressPrompt(first.stop))[1] == done
    assert not other.buffers
    assert other.unload(ONE, UnloadModel("scorer", keep=False)).bytes == one.weights_bytes[0]
    assert other.weights_bytes == (0, 0)
    assert isinstance(other.compress(ONE, ASKED), DeviceFailed)


def wanted() -> object:
    one = here()
    one.load(ONE, LOAD)
    return compressed(one)[1]


def test_what_is_forgotten_here_is_dropped_there(elsewhere: ScoredElsewhere) -> None:
    compressor, peer = elsewhere.compressor, elsewhere.scorer.peer
    compressor.load(ONE, LOAD)
    assert isinstance(compressor.compress(ONE, ASKED), PromptScored)
    compressor.forget(ONE)
    assert elsewhere.fates.seen[Op.DROP_SCORING] == 1
    there, _ = peer.ask(Op.FETCH_DRAFT, Nothing(), DraftMoved)
    assert there.memory[3] == 0


@pytest.mark.parametrize("when", ["asked", "answering"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "released"])
def test_a_death_is_a_failure_and_the_next_prompt_is_scored_by_another_life(
    elsewhere: ScoredElsewhere, when: str, kept: bool
) -> None:
    """kept: the weights were to stay, so they are not asked for again."""
    compressor, fates = elsewhere.compressor, elsewhere.fates
    compressor.load(ONE, LOAD)
    begun = compressor.compress(TWO, ASKED)
    assert isinstance(begun, PromptScored)
    fates.coming[:] = [(Op.SCORE, when, 1)]
    _, failed = compressed(compressor)
    assert isinstance(failed, DeviceFailed)
    assert failed.kind == "io"
    assert compressor.weights_bytes == (0, 0)
    if not kept:
        assert compressor.unload(ONE, UnloadModel("scorer", keep=False)).bytes == 0
        assert isinstance(compressor.load(ONE, LOAD), ModelLoaded)
    assert compressed(compressor)[1] == wanted()
    assert elsewhere.scorer.peer.restarts == 1
    gone = compressor.compress(TWO, CompressPrompt(begun.stop))  # what the first life had of it
    assert isinstance(gone, DeviceFailed)
    assert "is gone" in gone.detail


def test_one_that_cannot_be_had_is_a_failure_of_loading(elsewhere: ScoredElsewhere) -> None:
    compressor, fates = elsewhere.compressor, elsewhere.fates
    for op in (Op.FETCH_DRAFT, Op.HELLO, Op.LOAD_SCORER):
        assert isinstance(compressor.load(ONE, LOAD), ModelLoaded)
        if op is not Op.FETCH_DRAFT:  # it is to be had anew
            elsewhere.dial.kill()
            assert isinstance(compressor.load(ONE, LOAD), DeviceFailed)
        fates.coming[:] = [(op, "asked", 0)]
        assert isinstance(compressor.load(ONE, LOAD), DeviceFailed)
        assert fates.died[-1] is op
    assert compressed(compressor)[1] == wanted()


def tokens_of(ids: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(ids, dtype=dtype)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (None, "nothing of prompt 7 was scored before"),
        (tokens_of(PROMPT[:3]), f"a prompt is 8 to {MOST} tokens"),
        (tokens_of((1,) * (MOST + 1)), f"a prompt is 8 to {MOST} tokens"),
        (tokens_of(PROMPT, torch.int64), f"a prompt is 8 to {MOST} tokens"),
        (tokens_of((*PROMPT, VOCAB)), f"a token that is not one of {VOCAB}"),
        (tokens_of((-1, *PROMPT)), f"a token that is not one of {VOCAB}"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_the_connection_goes_on(
    elsewhere: ScoredElsewhere, tensor: torch.Tensor | None, why: str
) -> None:
    compressor, peer = elsewhere.compressor, elsewhere.scorer.peer
    compressor.load(ONE, LOAD)
    given = {} if tensor is None else {"tokens": tensor}
    with pytest.raises(ValueError, match=why):
        peer.ask(Op.SCORE, ScorePrompt(7, describe_tensors(given)), PromptAdvanced, list(given.values()))
    assert compressed(compressor)[1] == wanted()
    assert not peer.restarts


def test_no_more_prompts_are_begun_than_there_can_be(elsewhere: ScoredElsewhere) -> None:
    compressor, peer = elsewhere.compressor, elsewhere.scorer.peer
    compressor.load(ONE, LOAD)
    given = {"tokens": tokens_of(PROMPT)}
    for number in range(MOST_SCORINGS):
        peer.ask(Op.SCORE, ScorePrompt(number, describe_tensors(given)), PromptAdvanced, list(given.values()))
    with pytest.raises(ValueError, match="on their way already"):
        peer.ask(Op.SCORE, ScorePrompt(MOST_SCORINGS, describe_tensors(given)), PromptAdvanced, list(given.values()))


# --- in the engine ---

SHAPE = {"device": "cpu", "max_ctx": 512, "slots": 2, "draft": "none", "disk_prefix_cache": "off"}
SHAPE |= {"prefill_compression": "always", "prefill_keep_ratio": 0.3}


async def shortened(target: LoadedModel, jobs: list[Job]) -> tuple[list[object], list[str]]:
    """Return the answers, and the reasons why prompts were not shortened."""
    heard = await answers(target, jobs, rates=FLAT)
    compressions = [one.closed.report.compression for one in heard if one.closed is not None]
    return words(heard), [one.why_not for one in compressions if one is not None]


async def test_prompts_are_answered_alike_and_as_they_are_when_the_drafter_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Compression("always", 300)
    jobs = [evolve(job, compression=asked, salt=str(at)) for at, job in enumerate(await made("demo", 2))]
    whole = await load_target(build_options(model="demo", **SHAPE))
    expected = await shortened(whole, jobs)
    plain = await shortened(whole, [evolve(job, compression=Compression()) for job in jobs])
    await whole.close()
    assert expected[1] == ["", ""]
    fates, dials = Fates(), list[Threads]()
    on_threads(monkeypatch, fates, dials)
    target = await load_target(build_options(model="demo", **SHAPE, prefill_drafter_device="ipc+cpu:0"))
    shown = target.build_ledger(0).drafter
    assert (shown.device, shown.error) == ("ipc+cpu:0", "")
    assert await shortened(target, jobs) == expected
    fates.coming[:] = [(Op.SCORE, "asked", 0)]
    assert await shortened(target, jobs[:1]) == (plain[0][:1], ["drafter_io"])
    assert await shortened(target, jobs) == expected
    assert target.build_ledger(0).drafter.restarts == 1
    for _ in range(2):  # as often as anybody likes
        await target.close()
    assert all(not thread.is_alive() for dial in dials for thread in dial.threads), "nothing is left running"
