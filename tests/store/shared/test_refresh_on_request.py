"""Tests of what a fleet needs of the shared tier: it knows when runs are written, and it sees at once what other
servers have written.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import define, field

pytest.importorskip("obstore")

from adapters.store.shared import refresher
from adapters.store.shared.object_client import ObjectClient, StoreUnreachable
from adapters.store.shared.open_client import open_client
from tests.store.kit import BLOCK_SIZE, EVERYTHING, LAYOUT, save
from tests.store.shared.test_shared_tier import NEXT, TOKENS, SharedSite, site, wait_for

__all__ = ("site",)  # a fixture

LIMIT_S = 30
ROOT = LAYOUT.compute_root("rows").hex()


@define(eq=False)
class GatedClient(ObjectClient):
    """A client that lists and writes runs only while its gates are open, and whose listings can fail."""

    may_list: threading.Event = field(factory=threading.Event)
    may_write: threading.Event = field(factory=threading.Event)
    is_lost: bool = False
    listings: int = 0

    async def list_objects(self, folder: str) -> list:
        if folder != ROOT:
            return await ObjectClient.list_objects(self, folder)
        self.listings += 1
        await asyncio.to_thread(self.may_list.wait, LIMIT_S)
        if self.is_lost:
            raise StoreUnreachable("lost")
        return await ObjectClient.list_objects(self, folder)

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        if name.endswith(".zst"):
            await asyncio.to_thread(self.may_write.wait, LIMIT_S)
        await ObjectClient.write_object(self, name, parts, replace=replace)


def make_client(folder: Path) -> GatedClient:
    plain = open_client(f"file://{folder}")
    client = GatedClient(plain.url, plain._store)  # noqa: SLF001 - the same store
    client.may_list.set()
    client.may_write.set()
    return client


def test_a_requested_refresh_brings_what_another_server_has_written(site: SharedSite) -> None:
    writer, reader = site.open(EVERYTHING), site.open(EVERYTHING)
    writer.publish()
    prompt = (*TOKENS, *NEXT)
    assert reader.store.count_restorable_tokens(prompt, "shared") == 0
    assert reader.tier.request_refresh().result(LIMIT_S)
    assert reader.store.count_restorable_tokens(prompt, "shared") == len(TOKENS)
    assert reader.store.count_restorable_tokens(TOKENS, "shared") < len(TOKENS), "the last token is always computed"
    assert reader.store.count_restorable_tokens(prompt, "shared", "salt") == 0
    assert reader.store.count_restorable_tokens(prompt, "host") == 0
    assert not reader.store.hits, "nothing is counted"


def test_requests_during_a_refresh_are_answered_by_the_next_one(site: SharedSite) -> None:
    client = make_client(site.folder)
    tier = site.open(client=client).tier
    before = client.listings
    client.may_list.clear()
    first = tier.request_refresh()
    wait_for(lambda: client.listings > before)
    others = [tier.request_refresh() for _ in range(8)]
    client.may_list.set()
    assert all(one.result(LIMIT_S) for one in (first, *others))
    assert 2 <= client.listings - before <= 3, "a listing that was due anyway may have come first"


def test_a_listing_that_is_read_in_parts_counts_when_all_of_it_is_there(
    site: SharedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = site.open(), site.open()
    writer.store.run_bytes = LAYOUT.compute_size("rows", BLOCK_SIZE)
    writer.publish()
    monkeypatch.setattr(refresher, "MAX_HEADS", 3)
    assert reader.tier.request_refresh().result(LIMIT_S)
    assert len(reader.tier.index.entries) == len(site.runs()) > 3


def test_a_store_in_trouble_is_not_asked_again_for_a_request(site: SharedSite) -> None:
    client = make_client(site.folder)
    tier = site.open(client=client).tier
    client.is_lost = True
    assert not tier.request_refresh().result(LIMIT_S)
    assert tier.trouble
    before = client.listings
    assert tier.request_refresh().done()
    assert not tier.request_refresh().result(0)
    assert client.listings == before


def test_requests_end_with_their_tier(site: SharedSite) -> None:
    client = make_client(site.folder)
    tier = site.open(client=client).tier
    before = client.listings
    client.may_list.clear()
    tier.request_refresh()
    wait_for(lambda: client.listings > before)
    later = tier.request_refresh()
    closing = threading.Thread(target=tier.close)
    closing.start()
    assert not later.result(LIMIT_S)
    client.may_list.set()
    closing.join()
    assert not tier.request_refresh().result(0)


def test_writes_are_watched_until_all_that_were_queued_are_written(site: SharedSite) -> None:
    client = make_client(site.folder)
    server = site.open(client=client)
    assert server.tier.watch_writes().done()
    client.may_write.clear()
    save(server.store, TOKENS)
    first = server.tier.watch_writes()
    assert not first.done()
    client.may_write.set()
    first.result(LIMIT_S)
    assert server.store.count_restorable_tokens((*TOKENS, *NEXT), "shared") == len(TOKENS)


def test_writes_that_fail_end_the_watch_as_well(site: SharedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(site.folder)
    server = site.open(client=client)

    async def fail(*_: object, **__: object) -> None:
        raise StoreUnreachable("lost")

    monkeypatch.setattr(GatedClient, "write_object", fail)
    save(server.store, TOKENS)
    server.tier.watch_writes().result(LIMIT_S)
    assert server.tier.counts["write_errors"]
    monkeypatch.undo()
