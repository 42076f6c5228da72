"""Several servers on one store, which is a folder here: what one has published, another restores, and nothing else."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import define, field

pytest.importorskip("obstore")

from adapters.store.block_keys import chain_keys, pack_tokens
from adapters.store.files import seekable
from adapters.store.files.codec import CodecChooser
from adapters.store.files.file_format import Layout, Run, encode_run
from adapters.store.host_tier import HostTier
from adapters.store.lease import Miss
from adapters.store.open_store import SharedStoreSettings, create_index, open_shared, open_store
from adapters.store.shared import store_health
from adapters.store.shared.object_client import (
    ObjectClient,
    ObjectFacts,
    StoreUnreachable,
    limit_time,
    split_ranges,
)
from adapters.store.shared.open_client import open_client
from adapters.store.shared.publish_policy import SharedLimits
from adapters.store.shared.shared_tier import SharedTier
from adapters.store.shared.store_url import StoreUnusable, allows_http, check_url
from adapters.store.store import Store
from tests.store.kit import (
    BIG,
    BLOCK_SIZE,
    EVERYTHING,
    FULL,
    LAYOUT,
    OTHER,
    buffer_of,
    checkpoint,
    fetch,
    rows_of,
    save,
)

TOKENS = tuple(range(100, 100 + 10 * BLOCK_SIZE))
NEXT = (1, 2)  # behind a prompt, so that all of its blocks count


def wait_for(done: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


@define(eq=False)
class SharingServer:
    """One server's store: host memory that keeps nothing, and the shared tier."""

    store: Store[SharedTier]
    tier: SharedTier

    def publish(self, tokens: tuple[int, ...] = TOKENS) -> None:
        layout = self.store.layout
        save(self.store, tokens)
        if layout.draft is not None:
            save(self.store, tokens, "draft")
        if layout.state:
            checkpoint(self.store, tokens)
        wait_for(lambda: self.tier.is_complete)

    def restore(self, tokens: tuple[int, ...] = TOKENS) -> int:
        """The tokens that it has restored and compared with the truth; 0 if it has found none."""
        found = self.store.find_prefix((*tokens, *NEXT), 0)
        return 0 if isinstance(found, Miss) else fetch(self.store, (*tokens, *NEXT), found[0])


@define(eq=False)
class SharedSite:
    """A folder that is a store, and the servers that use it."""

    folder: Path
    servers: list[SharingServer] = field(factory=list)

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def open(self, layout: Layout = LAYOUT, client: ObjectClient | None = None, budget: int = 0) -> SharingServer:
        """A server that has seen all that is in the store."""
        lock = threading.RLock()
        if client is None:
            tier = open_shared(layout, SharedStoreSettings(self.url, budget), lock)
        else:
            limits = SharedLimits(BIG, budget, 1e9)
            tier = SharedTier(client, layout, lock, limits, CodecChooser("zstd"))
            tier.start()
        self.servers.append(SharingServer(Store(layout, (HostTier(create_index(layout, 0)), tier), lock), tier))
        wait_for(lambda: tier.is_complete or tier.trouble)
        return self.servers[-1]

    def runs(self, layout: Layout = LAYOUT) -> list[Path]:
        return sorted((self.folder / layout.compute_root("rows").hex()).glob("*.zst"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SharedSite]:
    made = SharedSite(tmp_path / "shared")
    yield made
    for server in made.servers:
        assert server.tier.close()


def test_one_server_restores_what_another_has_published(site: SharedSite) -> None:
    site.open(EVERYTHING).publish()
    other = site.open(EVERYTHING)
    found = other.store.find_prefix((*TOKENS, *NEXT), 0)
    assert not isinstance(found, Miss)
    name, lease = found
    assert (lease.length, lease.tier, lease.checkpoints) == (len(TOKENS), "shared", (len(TOKENS),))
    assert lease.draft, "a draft's rows are shared as well"
    assert fetch(other.store, (*TOKENS, *NEXT), name) == len(TOKENS)
    assert other.tier.collect_figures().build_json()["read_bytes"] == sum(
        path.stat().st_size for path in site.runs(EVERYTHING)
    )


def test_another_draft_or_none_finds_the_rows_all_the_same(site: SharedSite) -> None:
    site.open(FULL).publish()
    assert site.open(LAYOUT).restore() == len(TOKENS)


def test_other_identities_find_nothing_and_their_objects_lie_apart(site: SharedSite) -> None:
    site.open().publish()
    other = site.open(OTHER)
    assert not other.restore()
    other.publish()
    assert {path.name for path in site.runs()}.isdisjoint(path.name for path in site.runs(OTHER))
    assert other.restore() == len(TOKENS)


def test_a_run_that_is_there_is_not_written_again(site: SharedSite) -> None:
    first, second = site.open(), site.open()
    first.publish()
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in site.runs()]
    second.publish()
    assert [(path.name, path.stat().st_mtime_ns, path.stat().st_ino) for path in site.runs()] == before
    assert second.tier.collect_figures().build_json()["already_there"] == len(before)


def test_runs_that_overlap_are_found_from_end_to_end(site: SharedSite) -> None:
    """Two servers read prompts with one head at the same time. Neither knows of the other's runs."""
    one, other = (*TOKENS, *range(500, 500 + 6 * BLOCK_SIZE)), (*TOKENS, *range(700, 700 + 6 * BLOCK_SIZE))
    first, second = site.open(), site.open()
    first.publish(one)
    second.publish(other)
    third = site.open()
    assert third.restore(one) == len(one)
    assert third.restore(other) == len(other)


def test_when_a_run_goes_what_overlaps_it_is_found_in_the_other(site: SharedSite) -> None:
    first, second = site.open(), site.open()
    first.publish((*TOKENS, *range(500, 500 + 6 * BLOCK_SIZE)))
    second.publish((*TOKENS, *range(700, 700 + 6 * BLOCK_SIZE)))
    third = site.open()
    entries = [*third.tier.index.entries.values()]
    with third.tier.lock:
        third.tier.catalogue.forget(entries[0])
    assert third.restore() == len(TOKENS)
    assert {key for entry in third.tier.index.entries.values() for key in entry.keys} == set(
        third.store.list_block_keys()["shared"]
    )


def test_keys_are_listed_by_tier(site: SharedSite) -> None:
    server = site.open()
    server.publish()
    keys = chain_keys(LAYOUT.compute_root("rows"), pack_tokens(TOKENS), BLOCK_SIZE)
    assert server.store.list_block_keys() == {"host": (), "shared": keys}


def test_a_closed_server_has_written_everything_and_signed_off(site: SharedSite) -> None:
    server = site.open()
    assert len([*(site.folder / "servers").glob("*.json")]) == 1
    save(server.store, TOKENS)
    assert server.tier.close()
    assert not [*(site.folder / "servers").glob("*.json")]
    assert site.open().restore() == len(TOKENS)


def test_a_store_over_its_budget_takes_no_more(site: SharedSite) -> None:
    server = site.open(budget=64)
    save(server.store, TOKENS)
    wait_for(lambda: server.tier.is_complete)
    assert not site.runs()
    assert server.tier.collect_figures().build_json()["dropped_no_room"]


# --- hostile objects ---


def encode(tokens: tuple[int, ...], layout: Layout = LAYOUT, content: tuple[int, ...] | None = None) -> bytes:
    """A run's file. content: tokens whose rows it holds instead of its own."""
    root, packed = layout.compute_root("rows"), pack_tokens(tokens)
    run = Run(0, root, chain_keys(root, packed, BLOCK_SIZE), packed)
    data = buffer_of(rows_of(content or tokens, layout=layout), layout).data.numpy().data
    return b"".join(encode_run(run, layout, data, seekable.create_compressor(1)))


def swap_frames(raw: bytes, other: bytes) -> bytes:
    """Our head, with another run's rows and table."""
    sizes = seekable.parse_table(memoryview(raw)[-seekable.compute_table_size(2) :], len(raw))
    theirs = seekable.parse_table(memoryview(other)[-seekable.compute_table_size(2) :], len(other))
    head, rows = raw[: sizes[0][0]], other[theirs[0][0] : theirs[0][0] + theirs[1][0]]
    return head + rows + seekable.encode_table([sizes[0], (len(rows), theirs[1][1])])


def bomb(size: int) -> bytes:
    """A frame of zeros that says how large it is."""
    return seekable.create_compressor(1).compress(bytes(size))


def disguise(raw: bytes) -> bytes:
    """A frame whose header promises few bytes and whose content is long."""
    long = bytearray(bomb(32 << 20))
    return bytes(raw[:6]) + bytes(long[6:])


OTHERS = tuple(range(900, 900 + 10 * BLOCK_SIZE))
GOOD, WRONG = encode(TOKENS), encode(OTHERS)
HOSTILE = {
    "empty": b"",
    "garbage": b"\x00\xff" * 500,
    "cut in its head": GOOD[:40],
    "cut in its rows": GOOD[:-30],
    "longer": GOOD + b"x",
    "one bit": GOOD[:-60] + bytes([GOOD[-60] ^ 1]) + GOOD[-59:],
    "another run": WRONG,
    "another run's rows": swap_frames(GOOD, WRONG),
    "another identity": encode(TOKENS, OTHER),
    "a bomb": bomb(64 << 20),
    "a bomb of a head's size": bomb(8 << 20),
    "a bomb in disguise": disguise(GOOD),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_objects_never_give_wrong_rows_and_are_counted(site: SharedSite, how: str) -> None:
    """`restore` compares every row with the truth. What is left of the prompt is computed."""
    site.open().publish()
    (path,) = site.runs()
    path.write_bytes(HOSTILE[how])
    server = site.open()
    if server.tier.index.entries:  # its head is right, so it is read
        with pytest.raises(seekable.Damaged):
            server.restore()
    assert not server.restore()
    assert not server.tier.index.entries, "it is not found again"
    assert server.tier.collect_figures().build_json()["damaged"] == 1
    assert server.tier.damaged_files == {"shared": 1}


def test_an_object_of_another_format_is_left_alone(site: SharedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.open().publish()
    (path,) = site.runs()
    with monkeypatch.context() as patched:
        patched.setattr("adapters.store.files.file_format.VERSION", 99)
        path.write_bytes(encode(TOKENS))
    server = site.open()
    assert not server.restore()
    figures = server.tier.collect_figures().build_json()
    assert (figures["other_format"], figures["damaged"]) == (1, 0)
    newer = path.read_bytes()
    server.publish()
    assert path.read_bytes() == newer, "a newer server reads it, and would have to write it again"


def test_an_object_that_cannot_be_read_takes_nothing_else_away(site: SharedSite) -> None:
    site.open().publish()
    (path,) = site.runs()
    path.with_name(path.name.replace("-0", "-1")).mkdir()
    (path.with_name(path.name.replace(path.name[:8], "0" * 8))).symlink_to("/nowhere")
    server = site.open()
    assert server.restore() == len(TOKENS)
    assert not server.tier.trouble


def test_a_damaged_object_is_replaced_by_who_computes_the_run(site: SharedSite) -> None:
    site.open().publish()
    (path,) = site.runs()
    path.write_bytes(HOSTILE["another run's rows"])
    server = site.open()
    with pytest.raises(seekable.Damaged):
        server.restore()
    server.publish()
    assert site.open().restore() == len(TOKENS)


def test_hostile_marks_and_reports_are_ignored(site: SharedSite) -> None:
    server = site.open()
    server.publish()
    (name,) = (path.name for path in site.runs())
    for folder, content in (("marks", b'{"runs":["../../x"]}'), ("servers", b"[" * 5000), ("marks", b"x" * (2 << 20))):
        (site.folder / folder).mkdir(exist_ok=True)
        number = len([*(site.folder / folder).iterdir()])
        stem = f"{number:016x}-{number:08x}" if folder == "marks" else f"{number:016x}"
        (site.folder / folder / f"{stem}.json").write_bytes(content)
    (site.folder / "marks" / "stranger.json").write_bytes(b"{}")
    (site.folder / name).write_bytes(b"")
    other = site.open()
    assert other.restore() == len(TOKENS)
    assert not other.tier.trouble
    assert other.tier.collect_figures().build_json()["damaged"] == 2


# --- a store that is lost, or slow ---


class FailingClient(ObjectClient):
    """A client whose store fails or hangs while it is asked to."""

    how = ""
    reads = 0  # of whole objects; a refresh that runs meanwhile reads parts

    async def list_objects(self, folder: str) -> list[ObjectFacts]:
        await self.fail()
        return await super().list_objects(folder)

    async def read_range(self, name: str, start: int, stop: int) -> memoryview:
        await self.fail()
        return await super().read_range(name, start, stop)

    async def read_object(self, name: str, size: int) -> list[memoryview]:
        self.reads += 1
        await self.fail()
        return await super().read_object(name, size)

    async def write_object(self, name: str, parts: object, *, replace: bool = False) -> None:
        await self.fail()
        await super().write_object(name, parts, replace=replace)  # type: ignore[arg-type]

    async def fail(self) -> None:
        if self.how == "slow":
            async with limit_time(self, 0.2):
                await asyncio.sleep(60)
        if self.how:
            raise StoreUnreachable("connection refused")


@pytest.mark.parametrize("how", ["lost", "slow"])
def test_a_store_that_fails_costs_one_limit_and_comes_back(
    site: SharedSite, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(store_health, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(store_health, "REFRESH_S", 0.05)
    site.open().publish()
    client = FailingClient(site.url, open_client(site.url)._store)  # noqa: SLF001
    server = site.open(client=client)
    assert server.restore() == len(TOKENS)
    client.how, client.reads = how, 0
    with pytest.raises(OSError, match="no answer" if how == "slow" else "refused"):
        server.restore()
    assert client.reads == 1, "nothing is asked again"
    assert server.tier.trouble
    assert server.store.troubles.keys() == {"shared"}
    assert not server.restore(), "nothing is found, and nothing waits"
    save(server.store, OTHERS)
    assert client.reads == 1
    figures = server.tier.collect_figures().build_json()
    assert (figures["outages"], figures["usable"], figures["dropped_outage"]) == (1, False, 1)
    client.how = ""
    wait_for(lambda: not server.tier.trouble)
    assert server.restore() == len(TOKENS)
    assert server.tier.collect_figures().build_json()["outages"] == 1
    server.publish(OTHERS)
    assert site.open().restore(OTHERS) == len(OTHERS)


def test_a_run_that_was_removed_is_a_miss_and_no_outage(site: SharedSite) -> None:
    site.open().publish()
    server = site.open()
    for path in site.runs():
        path.unlink()
    with pytest.raises(OSError, match="removed"):
        server.restore()
    assert not server.restore()
    assert not server.tier.trouble


# --- the start ---


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("/folder", "no store"),
        ("http://host/x", "no store"),
        ("s3:///x", "no bucket"),
        ("file://host/x", "no folder"),
        ("s3://key:secret@bucket", "no user"),
        ("s3://bucket?x=1", "query"),
        ("s3://[bad", "accepted"),
    ],
)
def test_a_url_that_names_no_store_is_said_so(url: str, why: str) -> None:
    with pytest.raises(StoreUnusable, match=why) as found:
        check_url(url)
    assert "\n" not in str(found.value)
    assert "secret" not in str(found.value)


def test_a_store_that_cannot_be_reached_ends_the_start_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    began = time.monotonic()
    with pytest.raises(StoreUnusable) as found:
        open_store(LAYOUT, None, shared=SharedStoreSettings("s3://bucket/x"))
    assert time.monotonic() - began < 60, "a client of its own would try for minutes"
    assert "\n" not in str(found.value)
    assert "http://127.0.0.1:9/" in str(found.value)
    assert "Connection refused" in str(found.value)


def test_a_store_without_an_answer_is_named_with_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://10.0.0.7:9000")
    client = open_client("s3://bucket/x")

    async def wait_in_vain() -> None:
        async with limit_time(client, 0.0):
            await asyncio.Event().wait()

    with pytest.raises(
        StoreUnreachable, match=r"no answer within 0\.0 s from s3://bucket/x at http://10\.0\.0\.7:9000"
    ):
        asyncio.run(wait_in_vain())
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert client.place == "s3://bucket/x"


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StoreUnusable, match=r"rekindle\[shared\]"):
        open_client("s3://bucket")


@pytest.mark.parametrize(
    ("size", "count"), [(1, 1), (4 << 20, 1), (6 << 20, 2), ((6 << 20) - 1, 1), (32 << 20, 8), ((4 << 20) * 3 + 5, 3)]
)
def test_an_object_is_read_in_ranges_without_a_gap(size: int, count: int) -> None:
    spans = split_ranges(size)
    assert (len(spans), spans[0][0], spans[-1][1]) == (count, 0, size)
    assert all(one[1] == other[0] for one, other in pairwise(spans))


def test_pieces_are_one_content(site: SharedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.store.shared.object_client.RANGE_BYTES", 100)
    site.open().publish()
    assert site.open().restore() == len(TOKENS)


@pytest.mark.parametrize(
    ("environment", "allowed"),
    [
        ({}, False),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, True),
        ({"AWS_ENDPOINT_URL": "https://s3.example"}, False),
        ({"GOOGLE_ALLOW_HTTP": "true"}, True),
        ({"AZURE_ALLOW_HTTP": "false"}, False),
    ],
)
def test_a_store_is_asked_without_encryption_only_where_the_environment_says_so(
    environment: dict[str, str], allowed: bool
) -> None:
    assert allows_http(environment) == allowed
