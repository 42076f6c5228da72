"""Digests in any order, lost and repeated: a router that is in step knows exactly what a replica holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from states.rates import Rates
from states.routing.digests import (
    RECENT_DIGESTS,
    DigestReader,
    DigestWriter,
    LoadReport,
    ReplicaDigest,
    TierChange,
    select_keys,
)
from states.routing.fleet_view import FleetView
from states.routing.route_prices import TIERS
from tests.examples import count_examples

KEYS = [bytes([number]) for number in range(6)]
HELD = st.dictionaries(st.sampled_from(TIERS), st.sets(st.sampled_from(KEYS)), max_size=4)


def claims(view: FleetView, name: str) -> dict[str, set[bytes]]:
    """Return the keys that the view has for a replica by tier: by the replica's own record, which must agree with the
    index.
    """
    replica = view.replicas[name]
    held = dict(zip(TIERS, replica.held, strict=True))
    indexed = {
        tier: {key for key, masks in view._index.items() if masks[place] >> replica.number & 1}  # noqa: SLF001
        for place, tier in enumerate(TIERS)
    }
    assert indexed == held
    return {tier: keys for tier, keys in held.items() if keys}


def named(held: dict[str, set[bytes]]) -> dict[str, set[bytes]]:
    return {tier: keys for tier, keys in held.items() if keys}


@settings(max_examples=count_examples(150), deadline=None)
@given(
    st.lists(st.tuples(HELD, st.booleans()), min_size=1, max_size=14),
    st.integers(1, 5),
    st.data(),
)
def test_any_order_loss_and_repetition_leaves_no_claim_too_many_after_a_resync(steps, whole_every, data):
    """Each step: what is held then, and whether the replica has restarted before."""
    writer = DigestWriter(1, whole_every)
    truth = dict[tuple[int, int], dict[str, set[bytes]]]()
    sent = list[ReplicaDigest]()
    for held, restarted in steps:
        if restarted:
            writer = DigestWriter(writer.epoch + 1, whole_every)
        writer.set_held({tier: sorted(keys) for tier, keys in held.items()})
        sent.append(writer.write(LoadReport()))
        truth[sent[-1].epoch, sent[-1].number] = named(held)
    arriving = data.draw(st.lists(st.sampled_from(sent), max_size=30))
    view = FleetView()
    view.add_replica("other")
    view.add_replica("one")
    for digest in arriving:
        view.apply_digest("one", digest)
        reader = view.replicas["one"].reader
        if reader.is_void:
            assert claims(view, "one") == {}
        else:
            # What is claimed was true at the digest that was applied last, and is out of date if others were missed.
            assert claims(view, "one") == truth[reader.epoch, reader.number]
        if not reader.has_gap and not reader.is_void:
            newest = max((one.epoch, one.number) for one in arriving[: arriving.index(digest) + 1])
            assert (reader.epoch, reader.number) >= newest
    # A whole digest of now puts everything right, whatever came before.
    last = DigestWriter(sent[-1].epoch, 1, number=sent[-1].number)
    last.set_held({"host": [KEYS[0]]})
    view.apply_digest("one", last.write(LoadReport()))
    assert claims(view, "one") == {"host": {KEYS[0]}}
    assert claims(view, "other") == {}


@settings(max_examples=count_examples(60), deadline=None)
@given(st.lists(HELD, min_size=1, max_size=30), st.data())
def test_a_reader_that_misses_seven_messages_in_a_row_needs_no_whole_digest(steps, data):
    writer = DigestWriter(3)
    view = FleetView()
    view.add_replica("one")
    missed = 0
    for held in steps:
        writer.set_held({tier: sorted(keys) for tier, keys in held.items()})
        writer.write(LoadReport())
        if missed < RECENT_DIGESTS - 1 and data.draw(st.booleans()):
            missed += 1
            continue
        missed = 0
        for digest in writer.list_recent():
            view.apply_digest("one", digest)
        assert claims(view, "one") == named(held)


def test_changes_that_cancel_out_are_not_told():
    writer = DigestWriter(1)
    writer.note_change("host", KEYS[:2])
    writer.write(LoadReport())
    writer.note_change("host", [KEYS[2]], [KEYS[0]])
    writer.note_change("host", [KEYS[0]], [KEYS[2]])
    assert writer.write(LoadReport()).changes == ()


def test_a_digest_is_bounded_by_keys_of_each_tier():
    writer = DigestWriter(1, most_keys=3)
    writer.set_held({"disk": KEYS, "host": KEYS[:1]})
    assert writer.write(LoadReport()).key_count == 4


def test_recent_digests_stop_at_a_whole_one():
    writer = DigestWriter(1, whole_every=4)
    for _ in range(6):
        writer.write(LoadReport())
    assert [digest.number for digest in writer.list_recent()] == [5, 6]


def test_a_late_digest_of_an_earlier_process_says_nothing():
    reader = DigestReader()
    assert reader.accept(ReplicaDigest(2, 1, True, ()))
    assert not reader.accept(ReplicaDigest(1, 9, True, ()))
    assert (reader.epoch, reader.number) == (2, 1)


def test_a_restarted_replica_holds_nothing_until_it_says_so():
    view = FleetView()
    view.add_replica("one")
    view.apply_digest("one", ReplicaDigest(1, 1, True, (TierChange("host", frozenset(KEYS)),)))
    view.apply_digest("one", ReplicaDigest(2, 5, False, (TierChange("host", frozenset(KEYS[:1])),)))
    assert claims(view, "one") == {}


def test_the_load_of_the_newest_digest_is_believed_even_after_a_gap():
    view = FleetView()
    view.add_replica("one")
    view.apply_digest("one", ReplicaDigest(1, 1, True, ()))
    view.apply_digest("one", ReplicaDigest(1, 7, False, (), LoadReport(5, 2, 9, Rates((7,)))))
    assert view.replicas["one"].load.wait_ns == 5
    assert view.replicas["one"].prices.estimate_prefill_time(0, 10) == 70


def test_selected_keys_come_with_the_keys_before_them():
    runs = [(9, b"root", [b"a", b"b"]), (1, b"b", [b"c"]), (5, b"root", [b"x"])]
    assert select_keys(runs, 10) == [b"a", b"b", b"c", b"x"]
    assert select_keys(runs, 2) == [b"a", b"b"]
