"""Tests of the messages in which a server names its blocks to a router, with the real fold and a real store."""

from __future__ import annotations

import threading

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from adapters.store.block_keys import chain_keys, compute_root, pack_tokens
from adapters.store.host_tier import HostTier
from adapters.store.open_store import create_index
from adapters.store.store import Store
from effects.all import Launch
from effects.job import Job
from engine.core.block_digests import MOST_MESSAGE, DigestSource, decode_digests, encode_digests, list_tier_keys
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_store import build_simulated_layout, make_rows
from states.rates import Rates
from states.routing.digests import LoadReport, ReplicaDigest, TierChange
from states.routing.fleet_view import FleetView
from tests.engine.play import SETTINGS, ScriptedDevice, engine

PROMPT = tuple(range(100))


def keys_of(source: DigestSource, tokens: tuple[int, ...], salt: str = "") -> set[bytes]:
    size = SETTINGS.block_size
    return set(chain_keys(compute_root(source.identity, size, salt), pack_tokens(tokens), size))


def device_keys(message: bytes) -> set[bytes]:
    view = FleetView()
    view.add_replica("one")
    for digest in decode_digests(message):
        view.apply_digest("one", digest)
    return view.replicas["one"].held[0]


async def test_the_sequence_of_a_slot_is_told_with_its_salt_when_its_request_has_ended():
    async with engine() as running:
        source = DigestSource("model", None, 1, lambda: 0)
        world = running.door.read_world
        assert device_keys(source.take_message(world())) == set()
        async for _ in running.door.submit(Job(PROMPT, max_tokens=3, salt="owner")):
            pass
        kept = next(slot.tokens for slot in world().slots.slots if slot.tokens)
        assert len(kept) >= SETTINGS.block_size
        named_keys = device_keys(source.take_message(world()))
        assert named_keys == keys_of(source, kept, "owner")
        assert not named_keys & keys_of(source, kept)


def test_tiers_tell_their_runs_without_checkpoints():
    layout = build_simulated_layout(Costs(), 4)
    host = HostTier(create_index(layout, 1 << 30))
    store = Store(layout, (host,), threading.RLock())
    tokens = tuple(range(12))
    for run in store.find_missing_runs(tokens):
        assert store.keep_run(run, make_rows(layout.compute_size("rows", run.length)))
    expected = chain_keys(layout.compute_root("rows", ""), pack_tokens(tokens), 4)
    assert list_tier_keys(host.index) == list(expected)


async def test_the_load_is_the_time_that_waiting_prompts_miss():
    rates = Rates((1024,))
    go = anyio.Event()

    async def before(_: Launch) -> None:
        await go.wait()

    async with engine(evolve(SETTINGS, slots=1, rates=rates), ScriptedDevice(before=before)) as running:
        source = DigestSource("model", None, 1, lambda: 0)
        for _ in range(2):
            running.door.submit(Job(PROMPT, max_tokens=3))
        await anyio.wait_all_tasks_blocked()
        digest = decode_digests(source.take_message(running.door.read_world()))[-1]
        # One prompt waits, and the other one is being read, without its last token.
        assert digest.load.wait_ns == (100 + 99) * 1024
        assert digest.load.slots == 1
        go.set()


KEY = st.binary(min_size=16, max_size=16)
DIGESTS = st.builds(
    ReplicaDigest,
    st.integers(0, 2**62),
    st.integers(1, 2**40),
    st.booleans(),
    st.lists(st.builds(TierChange, st.text(max_size=5), st.frozensets(KEY), st.frozensets(KEY)), max_size=3).map(tuple),
    st.builds(
        LoadReport,
        st.integers(0, 2**50),
        st.integers(1, 99),
        st.integers(0, 2**50),
        st.builds(
            Rates,
            st.lists(st.integers(0, 2**40), max_size=10).map(tuple),
            st.dictionaries(st.text(max_size=4), st.integers(0, 9)),
        ),
    ),
)


@given(st.lists(DIGESTS, max_size=3))
def test_a_message_comes_back_as_it_was(digests):
    assert decode_digests(encode_digests(digests)) == digests


@given(st.binary(max_size=60))
def test_a_message_that_is_none_is_refused(message):
    try:
        decode_digests(message)
    except ValueError:
        return
    assert message  # an empty list, or what happens to be one


def test_keys_that_are_no_keys_and_messages_that_are_too_long_are_refused():
    bad = encode_digests([ReplicaDigest(1, 1, True, (TierChange("host", frozenset([b"short"])),))])
    with pytest.raises(ValueError, match="5 bytes of keys"):
        decode_digests(bad)
    with pytest.raises(ValueError, match="bytes of digests"):
        decode_digests(bytes(MOST_MESSAGE + 1))
