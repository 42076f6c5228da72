"""Runs that are only on disk come into the shared tier."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from attrs import evolve

pytest.importorskip("obstore")

from adapters.store.disk_publisher import DiskPublisher
from adapters.store.files.file_format import DraftLayout, Layout
from adapters.store.host_tier import HostTier
from adapters.store.lease import Miss
from adapters.store.open_store import SharedStoreSettings, create_index, open_shared, open_store
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.store import Store
from tests.store.kit import (
    BIG,
    BLOCK_SIZE,
    DRAFT,
    EVERYTHING,
    FULL,
    LAYOUT,
    checkpoint,
    disk_store,
    fetch,
    save,
    settled,
)
from tests.store.shared.test_shared_tier import wait_for

TOKENS = tuple(range(100, 100 + 10 * BLOCK_SIZE))
OTHER_DRAFT = evolve(FULL, draft=DraftLayout("ed" * 16, DRAFT.rows))


def fill_disk(path: Path, layout: Layout) -> None:
    """Leave everything of a prompt on disk, as a server without a shared tier does."""
    store = disk_store(path, layout=layout, host=BIG)
    save(store, TOKENS)
    if layout.draft is not None:
        save(store, TOKENS, "draft")
    if layout.state:
        checkpoint(store, TOKENS)
    settled(store)
    assert store.close()


def publish_disk(path: Path, url: str, layout: Layout) -> DiskPublisher:
    """Start a server with both tiers, and wait until it has published everything."""
    store = open_store(layout, path, disk_bytes=BIG, shared=SharedStoreSettings(url))
    assert store is not None
    publisher = store.upkeep
    assert isinstance(publisher, DiskPublisher)
    publisher.start()
    wait_for(lambda: not publisher.thread.is_alive())
    assert not any(thread.trouble for thread in store.threads)
    assert not store.damaged_files.get("run", 0)
    assert store.close()
    return publisher


def restore(url: str, layout: Layout) -> tuple[int, bool]:
    """Return the tokens that a server without a disk restores and compares, and whether a draft's rows are there."""
    lock = threading.RLock()
    tier: SharedTier = open_shared(layout, SharedStoreSettings(url), lock)
    store = Store(layout, (HostTier(create_index(layout, 0)), tier), lock)
    wait_for(lambda: tier.is_complete)
    found = store.find_prefix((*TOKENS, 1, 2), 0)
    if isinstance(found, Miss):
        length, has_draft = 0, False
    else:
        has_draft = bool(found[1].draft)
        length = fetch(store, (*TOKENS, 1, 2), found[0])
    assert store.close()
    return length, has_draft


@pytest.mark.parametrize("layout", [LAYOUT, FULL, EVERYTHING], ids=["rows", "draft", "states"])
def test_another_server_restores_what_was_only_on_disk(tmp_path: Path, layout: Layout) -> None:
    fill_disk(tmp_path / "kv", layout)
    url = f"file://{tmp_path}/shared"
    published = publish_disk(tmp_path / "kv", url, layout).published
    assert published > 0
    assert restore(url, layout) == (len(TOKENS), layout.draft is not None)
    assert publish_disk(tmp_path / "kv", url, layout).published == 0, "nothing is published twice"


def test_rows_of_another_draft_stay_on_disk_unharmed(tmp_path: Path) -> None:
    fill_disk(tmp_path / "kv", OTHER_DRAFT)
    url = f"file://{tmp_path}/shared"
    publish_disk(tmp_path / "kv", url, FULL)
    assert restore(url, FULL) == (len(TOKENS), False)
    assert not list((tmp_path / "kv").glob("damaged-*"))


def test_a_server_that_closes_does_not_wait_for_all_runs(tmp_path: Path) -> None:
    fill_disk(tmp_path / "kv", LAYOUT)
    store = open_store(LAYOUT, tmp_path / "kv", disk_bytes=BIG, shared=SharedStoreSettings(f"file://{tmp_path}/shared"))
    assert store is not None
    assert store.upkeep is not None
    store.upkeep.start()
    assert store.close()
    assert not store.upkeep.thread.is_alive()
