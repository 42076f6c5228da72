"""Makes the digests of this server: the blocks of its slots and tiers, its load and its rates (`states/routing`).

The server answers `GET /kv/digests` with the last of them. The actor of a replica in a fleet asks for it, and hands it
to the routers (`engine/fleet/digests.py`). Nothing else uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from attrs import define, field

from adapters.store.block_index import BlockIndex
from adapters.store.block_keys import KEY_BYTES, chain_keys, compute_root, pack_tokens
from adapters.store.store import Store
from effects.ids import RequestId, Tier, Tokens
from states.rates import Rates, estimate_prefill_time
from states.request_states import Prefilling, Restoring, Speculating, State, Waiting, get_remainder
from states.routing.digests import MOST_KEYS, DigestWriter, LoadReport, ReplicaDigest, TierChange, select_keys
from states.routing.route_prices import round_rates
from states.slots import Slot, find_row_salt
from states.world import World

MOST_MESSAGE: Final = 4 << 20  # bytes of digests; a longer message is refused
SMOOTHING = 8  # answers that the average time of an answer covers, about


@define(eq=False)
class DigestSource:
    """The digests of one engine.

    identity: of the model; every key depends on it. store: None if nothing is kept beyond the device.
    epoch: a number of this process. It is greater than the number of any process before it. clock_ns: the engine's
    clock.
    """

    identity: str
    store: Store[Any] | None
    epoch: int
    clock_ns: Callable[[], int]
    writer: DigestWriter = field(init=False)
    _lock: threading.Lock = field(factory=threading.Lock)
    _slot_keys: dict[int, tuple[Tokens, str, tuple[bytes, ...]]] = field(
        factory=dict[int, "tuple[Tokens, str, tuple[bytes, ...]]"]
    )
    _answering: dict[int, int] = field(factory=dict[int, int])  # request -> when its answer was first seen
    _answer_ns: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.writer = DigestWriter(self.epoch)

    def take_message(self, world: World) -> bytes:
        """Return the last digests after one more was written, of the world as it is now.

        Any thread may call it. It hashes sequences, which takes 10 ms for 100,000 tokens.
        """
        with self._lock:
            self._measure_answers(world.requests)
            self.writer.set_held(self._list_held(world))
            self.writer.write(report_load(world, round(self._answer_ns)))
            return encode_digests(self.writer.list_recent())

    def _list_held(self, world: World) -> dict[Tier, list[bytes]]:
        held = {"device": self._list_device_keys(world)}
        if self.store is not None:
            with self.store.lock:
                for tier in self.store.tiers:
                    held[tier.name] = list_tier_keys(tier.index)
        return held

    def _list_device_keys(self, world: World) -> list[bytes]:
        """Return the keys of what slots hold. Keys are computed again only for sequences that have changed."""
        settings = world.settings
        found = list[bytes]()
        for number, slot in enumerate(world.slots.slots):
            tokens = find_settled_tokens(slot, world.requests)
            salt = find_row_salt(slot, world.requests)
            if not tokens or salt is None:
                self._slot_keys.pop(number, None)
                continue
            known = self._slot_keys.get(number)
            # Tuples that are the same object are equal without a look at their tokens.
            if known is None or known[:2] != (tokens, salt):
                root = compute_root(self.identity, settings.block_size, salt)
                known = (tokens, salt, chain_keys(root, pack_tokens(tokens), settings.block_size))
                self._slot_keys[number] = known
            found += known[2]
        return found

    def _measure_answers(self, requests: Mapping[Any, State]) -> None:
        """Note how long answers take, as far as two digests see their beginning and their end.

        Each answer moves the average by an eighth (`SMOOTHING`).
        """
        now = self.clock_ns()
        going_on = {request for request, state in requests.items() if isinstance(state, Speculating)}
        for request in [*self._answering]:
            if request not in going_on:
                took = now - self._answering.pop(request)
                self._answer_ns += (took - self._answer_ns) / SMOOTHING if self._answer_ns else took
        for request in going_on:
            self._answering.setdefault(request, now)


def find_settled_tokens(slot: Slot, requests: Mapping[RequestId, State]) -> Tokens:
    """Return the tokens of a slot whose rows are there and stay: its sequence, or the prompt that it answers.

    A prompt that is being read, and an answer, change with every step. Digests have them when that has ended.
    """
    if slot.holder is None:
        return slot.tokens
    state = requests.get(slot.holder)
    return state.prompt.tokens if isinstance(state, Speculating) else ()


def list_tier_keys(index: BlockIndex) -> list[bytes]:
    """Return the keys of the rows of a tier, those of the youngest runs first. Called with the store's lock."""
    runs = [(-entry.last_turn, entry.parent, entry.keys) for entry in index.entries.values() if entry.kind == "rows"]
    return select_keys(runs, MOST_KEYS)


def report_load(world: World, answer_ns: int) -> LoadReport:
    """Return the load: the time to compute what waiting prompts and those being read still miss.

    A waiting prompt counts whole, because it is not known yet how many of its rows will be found.
    answer_ns: how long an answer takes on average.
    """
    rates = world.rates
    wait_ns = 0
    for state in world.requests.values():
        match state:
            case Waiting(prompt):
                wait_ns += estimate_prefill_time(rates, 0, len(prompt.tokens))
            case Prefilling() | Restoring():
                left = get_remainder(state)
                start = min(left.slot_lease.valid_rows, left.prompt.prefill_rows)
                wait_ns += estimate_prefill_time(rates, start, left.prompt.prefill_rows)
            case _:
                pass
    return LoadReport(wait_ns, world.settings.serving_slots, answer_ns, round_rates(rates))


class ChangeRecord(msgspec.Struct, frozen=True, array_like=True):
    """A change of one tier on the wire: keys end to end."""

    tier: str
    added: bytes
    removed: bytes


class DigestRecord(msgspec.Struct, frozen=True, array_like=True):
    """A digest on the wire."""

    epoch: int
    number: int
    whole: bool
    changes: tuple[ChangeRecord, ...]
    wait_ns: int
    slots: int
    answer_ns: int
    prefill: tuple[int, ...]
    loads: dict[str, int]


def encode_digests(digests: Iterable[ReplicaDigest]) -> bytes:
    """Return digests as one message."""
    records = [
        DigestRecord(
            digest.epoch,
            digest.number,
            digest.whole,
            tuple(
                ChangeRecord(change.tier, b"".join(change.added), b"".join(change.removed)) for change in digest.changes
            ),
            digest.load.wait_ns,
            digest.load.slots,
            digest.load.answer_ns,
            digest.load.rates.prefill,
            dict(digest.load.rates.loads),
        )
        for digest in digests
    ]
    return msgspec.msgpack.encode(records)


def decode_digests(message: bytes) -> list[ReplicaDigest]:
    """Return the digests of a message. Raises ValueError if it is none, or too long."""
    if len(message) > MOST_MESSAGE:
        raise ValueError(f"{len(message)} bytes of digests; accepted: {MOST_MESSAGE}")
    try:
        records = msgspec.msgpack.decode(message, type=list[DigestRecord])
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    return [decode_digest(record) for record in records]


def decode_digest(record: DigestRecord) -> ReplicaDigest:
    """Return the digest of a record. Raises ValueError for impossible numbers."""
    if min(record.wait_ns, record.answer_ns, record.slots - 1) < 0:
        raise ValueError(f"a load that cannot be: {record.wait_ns}, {record.answer_ns}, {record.slots}")
    changes = tuple(
        TierChange(change.tier, split_keys(change.added), split_keys(change.removed)) for change in record.changes
    )
    load = LoadReport(record.wait_ns, record.slots, record.answer_ns, Rates(record.prefill, record.loads))
    return ReplicaDigest(record.epoch, record.number, record.whole, changes, load)


def split_keys(joined: bytes) -> frozenset[bytes]:
    """Return keys that stand end to end. Raises ValueError for half a key."""
    if len(joined) % KEY_BYTES:
        raise ValueError(f"{len(joined)} bytes of keys, which have {KEY_BYTES} each")
    return frozenset(joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES))
