"""A shard's daemon on a thread of the test, with a small random model: real sockets, real frames, no process."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from attrs import define, evolve, field

from adapters.models.decoder import shard as shards
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.scorer import Scorer
from adapters.models.decoder.shard import OutputHead, Shard, ShardPlacement
from adapters.models.numerics.synthetic import RandomWeights
from adapters.remote.client.dial import Dial
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.daemon.daemon import Daemon
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.daemon.served_scorer import ServedScorer
from adapters.remote.protocol import shared_memory
from adapters.remote.protocol.channel import Channel, ConnectionBroken, Shared, WireFrame
from adapters.remote.protocol.draft_messages import LoadDraft
from adapters.remote.protocol.lent_memory import Borrower, Lender
from adapters.remote.protocol.messages import Facts, LoadLayers, Offer, Op, Prove
from adapters.remote.protocol.peer_expectation import Deadlines, ExpectedModel
from adapters.remote.protocol.scorer_messages import LoadScorer
from tests.models.checkpoints import proven

SECRET, VERSION = b"a secret of tests", "0.0.0"
LIMIT = 1 << 24
BUCKETS = (4, 8, 16, 32)  # of a drafter, so that prompts of tests are of several chunks
FACTS = Facts("weights", "config", 5, "cpu", "boot", 1, 1 << 30)
QUICK = Deadlines(prove=100, load=100, step=100)  # nothing here takes a second where nothing else runs


@define(eq=False)
class RandomModel:
    """The model side of a daemon: random weights, which are the same wherever they are made."""

    config: DenseConfig
    dtype: torch.dtype = torch.bfloat16
    given_facts: Facts = FACTS
    introduced: int = 0
    built: list[Shard] = field(factory=list[Shard])

    def facts(self) -> Facts:
        self.introduced += 1
        return self.given_facts

    def prove(self, asked: Prove) -> Offer:
        return asked.offers[0]

    def load(self, asked: LoadLayers) -> ServedLayers:
        first, last = asked.layers
        how = {"slots": asked.slots, "capacity": asked.capacity, "buckets": asked.buckets}
        how |= {"aux_layers": asked.aux_layers, "state_checkpoints": asked.state_checkpoints}
        shard = part(self.config, range(first, last), self.dtype, **how)
        self.built.append(shard)
        given = self.config.find_crossing(first, self.dtype, self.dtype)
        return ServedLayers(shard, self.config.num_layers, self.config.hidden_size, given.width)

    def load_draft(self, asked: LoadDraft) -> ServedDraft:
        raise ValueError("there is no draft here: name one with --draft")

    def load_scorer(self, asked: LoadScorer) -> ServedScorer:
        kernels = proven(self.config, self.dtype, asked.most, BUCKETS).copy_for_shard()
        weights = RandomWeights(self.config, scale=self.config.hidden_size**-0.5)
        return ServedScorer(Scorer(self.config, weights, kernels, torch.device("cpu"), self.dtype, BUCKETS, asked.most))


def part(config: DenseConfig, layers: range, dtype: torch.dtype, **how) -> DenseShard:
    weights = RandomWeights(config, scale=config.hidden_size**-0.5)
    return DenseShard(
        config, weights, proven(config, dtype, 512).copy_for_shard(), ShardPlacement(dtype=dtype, layers=layers, **how)
    )


@define(eq=False)
class Threads:
    """A dial: every opening is a daemon on a thread of its own. sharing: memory, too.

    meddle: is given the daemon's end of the connection and may say what it serves instead.
    """

    served: RandomModel
    sharing: bool = True
    secret: bytes = SECRET
    version: str = VERSION
    name: str = "thread:0"
    meddle: Callable[[Channel], Channel] = lambda channel: channel
    lender: Lender | None = None
    hello_s: float = 100
    opened: int = 0
    ends: list[Channel] = field(factory=list[Channel])
    threads: list[threading.Thread] = field(factory=list[threading.Thread])
    _memory: tuple[int, ...] = ()

    def begin(self) -> None:
        pass

    def open(self) -> Channel:
        self.end()
        self.opened += 1
        ours, theirs = socket.socketpair()
        if self.sharing:
            self._memory = tuple(
                one for one in (shared_memory.make_memory(), shared_memory.make_memory()) if one is not None
            )
        memory = self._memory

        def join(sizes: tuple[int, int]) -> Shared | None:
            if len(memory) != 2:
                return None
            into, out = (shared_memory.join_memory(one, size) for one, size in zip(memory, sizes, strict=True))
            return Shared(out, into, borrower=self.lender and Borrower(self.lender.descriptor))

        end = self.meddle(Channel(theirs))
        daemon = Daemon(end, self.served, self.secret, self.version, join)
        self.ends.append(end)
        self.threads.append(threading.Thread(target=quietly, args=(daemon,), daemon=True))
        self.threads[-1].start()
        return Channel(ours)

    def share(self, sizes: tuple[int, int]) -> Shared | None:
        if len(self._memory) != 2 or not all(sizes):
            return None
        out, into = (shared_memory.grow_memory(one, size) for one, size in zip(self._memory, sizes, strict=True))
        return Shared(out, into, self.lender)

    def kill(self) -> None:
        """End the connection at once, wherever it is, as the death of the process would."""
        self.ends[-1].close("killed")

    def end(self) -> str:
        if self.ends:
            self.ends[-1].close("killed")
            self.threads[-1].join(100)
            assert not self.threads[-1].is_alive()
        return ""


def slowly(channel: Channel) -> Channel:
    """A daemon's end behind a link that brings a few bytes at a time, either way, and pauses now and then."""
    near, far = socket.socketpair()

    def bring(source: socket.socket, target: socket.socket) -> None:
        sizes, brought = itertools.cycle((1, 27, 3, 1000, 5, 4096)), 0
        with suppress(OSError):
            while piece := source.recv(next(sizes)):
                target.sendall(piece)
                brought += len(piece)
                if brought > 1 << 13:
                    time.sleep(2e-3)
                    brought = 0
        for end in (source, target):  # both ways end, where one has
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def link(outer: socket.socket) -> None:
        with outer, near:
            back = threading.Thread(target=bring, args=(near, outer), daemon=True)
            back.start()
            bring(outer, near)
            back.join()

    threading.Thread(target=link, args=(channel.socket,), daemon=True).start()
    return Channel(far)


@define(eq=False)
class Mortal(Channel):
    """A daemon's end of its connection. It dies where `doom` says so."""

    doom: Callable[[Op, str], bool] = lambda *_: False
    at: Op = Op.HELLO

    def receive(self, seconds: float, *, patient: bool = False) -> WireFrame:
        frame = Channel.receive(self, seconds, patient=patient)
        self.at = Op(frame.head.op)
        if self.doom(self.at, "asked"):
            raise self.abort("killed")
        return frame

    def send(self, op, request, arguments, tensors=(), *, flags=0, seconds=None) -> None:
        if self.doom(self.at, "answering"):
            raise self.abort("killed")
        Channel.send(self, op, request, arguments, tensors, flags=flags, seconds=seconds)


@define(eq=False)
class Fates:
    """When the next deaths are: each behind so many of an op, or of any, when asked or when it is to be answered.

    gate: nothing is there again before it is set.
    """

    coming: list[tuple[Op | None, str, int]] = field(factory=list)
    gate: threading.Event = field(factory=threading.Event)
    seen: Counter[Op] = field(factory=Counter)
    died: list[Op] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.gate.set()

    def doom(self, op: Op, when: str) -> bool:
        if when == "asked":
            self.seen[op] += 1
        wanted, then, left = self.coming[0] if self.coming else (op, "", 0)
        if wanted not in {None, op} or then != when:
            return False
        if left:
            self.coming[0] = wanted, when, left - 1
            return False
        self.died.append(op)
        del self.coming[0]
        return True


def quietly(daemon: Daemon) -> None:
    with suppress(ConnectionBroken):
        daemon.run()


@define(eq=False)
class NoEnds:
    """Embedding and head for a draft, of which there is none."""

    nbytes: int = 0

    @property
    def embedding(self) -> torch.Tensor:
        raise AssertionError("there is no draft")

    @property
    def output(self) -> OutputHead:
        raise AssertionError("there is no draft")


def peer_of(dial, deadlines: Deadlines = QUICK, secret: bytes = SECRET, version: str = VERSION) -> Peer:
    return Peer(dial, secret, version, ExpectedModel("weights", "config"), deadlines)


def remote(
    dial: Threads | Dial, layers: range, peer: Peer | None = None, config: DenseConfig | None = None, **how
) -> RemoteShard:
    """config: of the model, where the dial does not say."""
    if config is None:
        assert isinstance(dial, Threads)
        config = dial.served.config
    peer = peer or peer_of(dial)
    peer.connect()
    given = {"slots": 3, "capacity": 512, "buckets": shards.BUCKETS, "aux_layers": (0, 2, 4)}
    given |= {"state_checkpoints": 2, "fast": False, "limit": LIMIT, "shared": (1 << 20, 1 << 20)} | how
    asked = LoadLayers(layers=(layers.start, layers.stop), **given)
    left = config.find_crossing(layers.stop, torch.bfloat16, torch.bfloat16).width
    return RemoteShard(peer, asked, NoEnds(), config.hidden_size, config.num_layers, left)


def split(config: DenseConfig, cuts: Sequence[int], dial: Callable[[], Threads]) -> Pipeline:
    """The first part is here, the others on threads."""
    parts, begin = list[Shard](), 0
    for number, end in enumerate(cuts):
        how = {"slots": 3, "capacity": 512, "aux_layers": (0, 2, 4), "state_checkpoints": 2}
        here = number == 0 and len(cuts) > 1
        own = range(begin, end)
        parts.append(part(config, own, torch.bfloat16, **how) if here else remote(dial(), own))
        begin = end
    return Pipeline(parts)


def with_facts(served: RandomModel, **facts: object) -> RandomModel:
    return evolve(
        served,
        given_facts=Facts(**{name: getattr(served.given_facts, name) for name in Facts.__struct_fields__} | facts),
    )
