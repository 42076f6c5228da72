"""Every field of every wire message at both ends of its type: it crosses, it is answered, and no process ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import attrs
import pytest
import torch
from attrs import define, field
from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec import inspect

from adapters import demo
from adapters.device.compression.score_prompt import Compressor
from adapters.http.edge_options import EdgeModel, EdgeOptions
from adapters.http.request.sampling_fields import read_sampling
from adapters.http.wire.fields import Fields
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.step import Segment, Step
from adapters.remote.client.attach_remote_draft import RemoteDrafting, asked_of
from adapters.remote.client.remote_scorer import RemoteScorer, build_scorer_request
from adapters.remote.daemon.answer_handlers import OpAnswer
from adapters.remote.daemon.daemon import OPS
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.daemon.served_scorer import ServedScorer
from adapters.remote.protocol.channel import Channel, WireFrame, is_failure
from adapters.remote.protocol.draft_messages import AskedProposals, DraftMoved, LoadDraft, SendAway
from adapters.remote.protocol.handshake import greet
from adapters.remote.protocol.lent_memory import Lender
from adapters.remote.protocol.load_request import build_draft_request, build_layers_request
from adapters.remote.protocol.messages import (
    Failure,
    LoadLayers,
    Nothing,
    Op,
    Prove,
    Unacceptable,
    WireMessage,
    decode_message,
    encode_message,
)
from adapters.remote.protocol.scorer_messages import DropScoring, LoadScorer
from adapters.text.tokenizer import Tokenizer
from effects.job import Sampling
from effects.ports import RowsLost
from engine.settings.options import Options
from tests.models.checkpoints import same_bits
from tests.models.draft_models import config_of
from tests.models.splits import CONFIGS
from tests.remote.client.test_draft import BUCKETS as DRAFT_BUCKETS
from tests.remote.client.test_draft import REQUESTS, Elsewhere, asking, follow, made, same, story
from tests.remote.client.test_drafter import LOAD, MARKS, MOST, ONE, ScoredElsewhere, compressed
from tests.remote.client.test_losses import life
from tests.remote.daemons import BUCKETS, SECRET, VERSION, RandomModel, Threads, peer_of, remote
from tests.remote.protocol.test_lending import whole
from tests.remote.wire_ends import all_kinds, at_ends, beyond, least

HYBRID = CONFIGS["hybrid"]


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_what_a_field_holds_at_either_end_crosses_and_nothing_beyond_does(kind: type[WireMessage]) -> None:
    base = least(kind)
    for where, message in at_ends(base):
        assert decode_message(encode_message(message), kind) == message, where
    for where, message in beyond(inspect.type_info(kind), base):
        with pytest.raises(Unacceptable):
            pytest.fail(f"{where} was taken: {decode_message(encode_message(message), kind)}")


# --- what senders produce ---


@define(eq=False)
class Bounds(Fields):
    """A request's fields that notes what numbers are read within, and has none."""

    seen: dict[str, tuple[float, float]] = field(factory=dict)

    def number(self, name: str, low: float, high: float) -> float | None:
        self.seen[name] = low, high
        return None

    def integer(self, name: str, low: int = -(1 << 63), high: int = (1 << 63) - 1) -> int | None:
        self.seen[name] = low, high
        return None


def sampled() -> dict[str, Sampling]:
    """Return every sampling that a request can ask for: each number that is read of it, at both ends of its range."""
    options, bounds = EdgeOptions(EdgeModel("demo", 512, 512)), Bounds({}, "$")
    tokenizer = Tokenizer.load(demo.FOLDER)
    read_sampling(bounds, options, tokenizer)
    assert {"temperature", "top_p", "top_k", "min_p", "seed"} <= bounds.seen.keys()
    ends = [(name, value) for name, pair in bounds.seen.items() for value in pair if name != "repeat_last_n"]
    found = {f"{name}={value}": read_sampling(Fields({name: value}, "$"), options, tokenizer) for name, value in ends}
    return {**found, "the last seed of 63 bits": Sampling(seed=(1 << 63) - 1)}


@pytest.mark.parametrize("sampling", sampled().values(), ids=sampled())
def test_whatever_a_request_may_be_picked_by_can_be_told_to_a_draft(sampling: Sampling) -> None:
    message = asked_of(asking(0, 100, sampling, 15), BlockRequest(0, 0, 100, 3, 15))
    assert decode_message(encode_message(message), AskedProposals) == message


def ends_of_options() -> dict[str, tuple[int, int]]:
    """Every option of `rekindle serve` that is a whole number, with the least and the most that is accepted."""
    found = dict[str, tuple[int, int]]()
    groups = attrs.asdict(Options(), recurse=False).values()
    hints = [item for group in groups for item in get_type_hints(type(group), include_extras=True).items()]
    for name, hint in hints:
        for one in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            for rule in one.validator if isinstance(one, Parameter) else ():
                if isinstance(rule, Number) and get_args(hint)[0] in {int, int | None}:
                    assert isinstance(rule.gte, int)
                    assert isinstance(rule.lte, int)
                    found[name] = rule.gte, rule.lte
    return found


OPTIONS = ends_of_options()
LARGE = Qwen3Config(151936, 8192, 28672, 80, 64, 8, 128, 1 << 21, 1e6)
CONTEXTS, SLOTS, TREES = (
    (max(1, OPTIONS[name][0]), OPTIONS[name][1]) for name in ("max_ctx", "slots", "ddtree_budget")
)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("slots", SLOTS)
def test_whatever_options_allow_can_be_asked_to_be_loaded(context: int, slots: int) -> None:
    """This holds for a large model too: the rows of a whole slot are more than ever crosses at once."""
    room: dict[str, Any] = {"slots": slots, "capacity": context, "buckets": BUCKETS}
    for places in OPTIONS["state_checkpoints"]:
        placement = ShardPlacement(layers=range(80), aux_layers=(0, 79), state_checkpoints=places, **room)
        asked = build_layers_request(LARGE, placement, fast=False)
        assert decode_message(encode_message(asked), LoadLayers) == asked
    for nodes in (0, *TREES):
        shape = config_of()
        placed = DraftPlacement(**room)
        drafted = build_draft_request(shape, placed, bits=0, nodes=nodes, rows=64, fast=False)
        assert decode_message(encode_message(drafted), LoadDraft) == drafted
    scored = build_scorer_request(context, fast=False)
    assert decode_message(encode_message(scored), LoadScorer) == scored


# --- what a daemon does with them ---


@define(eq=False)
class Overheard:
    """A recorder of what a daemon is asked: the first question of each operation, with its payload."""

    questions: dict[Op, tuple[WireMessage, bytes]] = field(factory=dict)
    kinds: dict[Op, type[WireMessage]] = field(factory=lambda: {op: kind for op, (kind, _) in OPS.items()})

    def meddle(self, channel: Channel) -> Channel:
        return Overhearing(channel.socket, overheard=self)


@define(eq=False)
class Overhearing(Channel):
    overheard: Overheard = field(factory=Overheard)

    def receive(self, seconds: float, *, patient: bool = False) -> WireFrame:
        frame = Channel.receive(self, seconds, patient=patient)
        op = Op(frame.head.op)
        if op in self.overheard.kinds and op not in self.overheard.questions:
            message = decode_message(frame.arguments, self.overheard.kinds[op])
            self.overheard.questions[op] = message, bytes(frame.payload)
        return frame


def asked_at_ends(overheard: Overheard, channel: Channel, ops: Mapping[Op, Any]) -> Counter[str]:
    """Each question that was overheard, with each field at each of its ends: what came of them all."""
    said, request = Counter[str](), 1 << 20
    assert set(ops) - overheard.questions.keys() <= {Op.LOGITS}, "what is not asked here is asked nowhere"
    for op in ops:
        base, payload = overheard.questions.get(op, overheard.questions.get(Op.FORWARD, (None, b"")))
        assert base is not None
        for where, message in at_ends(base):
            request += 1
            tensors = [torch.frombuffer(bytearray(payload), dtype=torch.uint8)] if payload else []
            channel.send(op, request, encode_message(message), tensors, seconds=50)
            frame = channel.answer(op, request, 50)
            if is_failure(frame):
                failure = decode_message(frame.arguments, Failure)
                assert failure.kind == "refused", f"{op.name} {where}: {failure.why}"
                said["refused"] += 1
            else:
                said["done"] += 1
    return said


def test_layers_answer_every_question_at_the_ends_of_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    overheard = Overheard()
    lender = Lender.open()
    served = Threads(RandomModel(HYBRID), sharing=lender is not None, lender=lender, meddle=overheard.meddle)
    far = remote(served, range(HYBRID.num_layers))
    before = life(far)
    if lender is None:
        pytest.skip("no memory is shared here")
    rows = far.rows.export(0, 0, 64)
    far.rows.import_runs(1, [(0, whole(rows, lender.take(1 << 20), 0, 64))], ())
    far.peer.read_posted_answers()
    with suppress(RuntimeError), far.settling(Step((Segment(1, 0, 4),), 4, rows_only=True)):
        raise RuntimeError("another shard")
    far.peer.read_posted_answers()
    channel = far.peer._channel  # noqa: SLF001 - what no peer says
    assert channel is not None
    said = asked_at_ends(overheard, channel, ServedLayers.ops)
    assert min(said["refused"], said["done"]) > 30, said
    assert all(same_bits(one, other) for one, other in zip(life(far), before, strict=True))
    assert (far.peer.restarts, served.opened) == (0, 1)
    assert not caplog.records, "nothing failed there"
    far.close()


def test_a_draft_answers_every_question_at_the_ends_of_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    apart, overheard = Elsewhere(), Overheard()
    apart.draft.close()
    apart.dial.meddle = overheard.meddle
    draft = made(peer_of(apart.dial))
    drafting = RemoteDrafting(draft, DRAFT_BUCKETS)
    before = story(draft, drafting)
    channel = draft.peer._channel  # noqa: SLF001 - what no peer says
    assert channel is not None
    said = asked_at_ends(overheard, channel, ServedDraft.ops)
    assert min(said["refused"], said["done"]) > 10, said
    draft.peer.ask(Op.FETCH_DRAFT, Nothing(), DraftMoved)
    same(story(draft, drafting), before)
    assert (draft.peer.restarts, draft.weights_state) == (0, "loaded")
    assert not caplog.records, "nothing failed there"
    draft.close()


def test_a_drafter_answers_every_question_at_the_ends_of_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    overheard, elsewhere = Overheard(), ScoredElsewhere()
    elsewhere.scorer.peer.close()
    elsewhere.dial.meddle = overheard.meddle
    peer = peer_of(elsewhere.dial)
    peer.connect()
    compressor = Compressor(RemoteScorer(peer, build_scorer_request(MOST, fast=False)), MARKS)
    compressor.load(ONE, LOAD)
    before = compressed(compressor)[1]
    peer.ask(Op.DROP_SCORING, DropScoring(3), Nothing)
    peer.ask(Op.SEND_DRAFT_AWAY, SendAway(keep=True), DraftMoved)
    channel = peer._channel  # noqa: SLF001 - what no peer says
    assert channel is not None
    said = asked_at_ends(overheard, channel, ServedScorer.ops)
    assert min(said["refused"], said["done"]) > 2, said
    peer.ask(Op.FETCH_DRAFT, Nothing(), DraftMoved)
    assert compressed(compressor)[1] == before
    assert not peer.restarts
    assert not caplog.records, "nothing failed there"
    peer.close()


@define(eq=False)
class Unloadable(RandomModel):
    """It says no to whatever is to be proven or loaded, once it has understood it."""

    heard: list[WireMessage] = field(factory=list)

    def _no(self, asked: WireMessage) -> NoReturn:
        self.heard.append(asked)
        raise ValueError("not here")

    prove = load = load_draft = load_scorer = _no


@pytest.mark.parametrize("kind", [Prove, LoadLayers, LoadDraft, LoadScorer], ids=lambda kind: kind.__name__)
def test_what_is_to_be_loaded_is_understood_at_the_ends_of_its_fields(kind: type[WireMessage]) -> None:
    (op,) = (op for op, (own, _) in OPS.items() if own is kind)
    served = Unloadable(HYBRID)
    dial = Threads(served)
    channel = dial.open()
    greet(channel, SECRET, VERSION, 50)
    messages = [message for _, message in at_ends(least(kind))]
    for request, message in enumerate(messages, 5):
        channel.send(op, request, encode_message(message), seconds=50)
        frame = channel.answer(op, request, 50)
        assert decode_message(frame.arguments, Failure) == Failure("refused", "not here")
    assert served.heard == messages
    channel.close()
    dial.end()


def test_a_failure_that_no_text_can_say_is_told_all_the_same() -> None:
    """File names may have bytes in them that are none of UTF-8."""
    served = Unloadable(HYBRID)
    served.heard = Refusing()
    dial = Threads(served)
    channel = dial.open()
    greet(channel, SECRET, VERSION, 50)
    channel.send(Op.PROVE, 5, encode_message(least(Prove)), seconds=50)
    assert decode_message(channel.answer(Op.PROVE, 5, 50).arguments, Failure).why.startswith("no file a?b")
    channel.close()
    dial.end()


class Refusing(list[WireMessage]):
    def append(self, _: WireMessage) -> NoReturn:
        raise ValueError("no file a\udcffb" + "x" * 9000)


# --- a refusal ends no connection ---


@pytest.mark.parametrize("op", [Op.DRAFT_STEP, Op.COPY_CONTEXT, Op.EXPORT_ROWS, Op.IMPORT_ROWS, Op.SEND_DRAFT_AWAY])
def test_a_draft_that_refuses_something_goes_on(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, refused = Elsewhere(), list[Op]()
    kind, work = ServedDraft.ops[op]

    def refusing(served: ServedDraft, asked: Any, given: Any) -> OpAnswer:
        if not refused:
            refused.append(op)
            raise Unacceptable("not this time")
        return work(served, asked, given)

    monkeypatch.setitem(ServedDraft.ops, op, (kind, refusing))
    process = apart.dial.opened
    with suppress(RowsLost, ValueError, AssertionError):
        story(apart.draft, apart.drafting)
    assert refused == [op]
    if apart.draft.weights_state != "loaded":
        apart.draft.load_back()
    follow(apart.draft, 0, 0, 100)
    assert apart.drafting.propose(REQUESTS[:1])[0].size > 0
    assert (apart.dial.opened, apart.draft.peer.restarts, apart.heard) == (process, 0, [])
    apart.draft.close()
