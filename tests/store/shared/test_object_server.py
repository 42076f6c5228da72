"""The shared tier against processes that speak the protocols of S3, Azure and Google, are killed and start again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore")

from adapters.store.host_tier import HostTier
from adapters.store.open_store import SharedStoreSettings, create_index, open_shared
from adapters.store.shared.open_client import open_client
from adapters.store.shared.store_url import StoreUnusable
from adapters.store.store import Store
from tests.store.google_server import GoogleServer, find_fake_gcs, google_server
from tests.store.kit import EVERYTHING, save
from tests.store.shared.test_shared_tier import NEXT, TOKENS, SharingServer, wait_for
from tests.store.shared_servers import (
    BUCKET,
    AzuriteServer,
    MotoServer,
    azurite_server,
    find_azurite,
    find_moto,
    moto_server,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]
URL = f"s3://{BUCKET}/some/prefix"


@pytest.fixture
def server() -> Iterator[MotoServer]:
    command = find_moto()
    if command is None:
        pytest.skip("no moto_server: pip install 'moto[server]'")
    with moto_server(command) as running:
        yield running


@pytest.fixture
def opened() -> Iterator[list[SharingServer]]:
    servers = list[SharingServer]()
    yield servers
    for one in servers:
        one.tier.close()


def open_server(opened: list[SharingServer], url: str = URL) -> SharingServer:
    lock = threading.RLock()
    tier = open_shared(EVERYTHING, SharedStoreSettings(url), lock)
    opened.append(SharingServer(Store(EVERYTHING, (HostTier(create_index(EVERYTHING, 0)), tier), lock), tier))
    wait_for(lambda: tier.is_complete)
    return opened[-1]


def test_what_one_server_has_published_another_restores(server: MotoServer, opened: list[SharingServer]) -> None:
    first = open_server(opened)
    first.publish()
    assert open_server(opened).restore() == len(TOKENS)
    second = open_server(opened)
    second.publish()
    assert not second.tier.collect_figures().build_json()["written"], "everything was there"
    assert not second.tier.collect_figures().build_json()["write_errors"]


def test_two_servers_that_write_one_run_at_once_write_it_once(server: MotoServer, opened: list[SharingServer]) -> None:
    first, second = open_server(opened), open_server(opened)
    first.publish()
    second.publish()
    figures = second.tier.collect_figures().build_json()
    assert (figures["written"], figures["already_there"] > 0) == (0, True)


def test_a_server_process_that_is_killed_and_started_again(server: MotoServer, opened: list[SharingServer]) -> None:
    one = open_server(opened)
    one.publish()
    assert one.restore() == len(TOKENS)
    server.kill()
    with pytest.raises(OSError, match=r"\w"):
        one.restore()
    assert not one.restore(), "it is looked up elsewhere at once"
    assert one.tier.trouble
    save(one.store, (*range(40), *NEXT))
    assert one.tier.collect_figures().build_json()["dropped_outage"]
    server.start()  # with nothing in it
    wait_for(lambda: not one.tier.trouble, 60)
    assert not one.restore(), "its objects are lost"
    one.publish()
    assert open_server(opened).restore() == len(TOKENS)


def test_wrong_credentials_and_buckets_end_the_start(server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnusable) as found:
        open_shared(EVERYTHING, SharedStoreSettings("s3://no-such-bucket/x"), threading.RLock())
    assert "\n" not in str(found.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    assert open_client(URL)
    with pytest.raises(StoreUnusable):
        open_shared(EVERYTHING, SharedStoreSettings(URL), threading.RLock())


def test_azure_keeps_what_servers_publish_and_may_go_away(opened: list[SharingServer]) -> None:
    command = find_azurite()
    if command is None:
        pytest.skip("no azurite-blob: npm install azurite, or name it in REKINDLE_AZURITE")
    with azurite_server(command) as server:
        share_and_lose(server, f"az://{BUCKET}/some/prefix", opened)


def test_google_keeps_what_servers_publish_and_may_go_away(opened: list[SharingServer]) -> None:
    command = find_fake_gcs()
    if command is None:
        pytest.skip("no fake-gcs-server: name it in REKINDLE_FAKE_GCS")
    with google_server(command) as server:
        share_and_lose(server, f"gs://{BUCKET}/some/prefix", opened)


def share_and_lose(server: AzuriteServer | GoogleServer, url: str, opened: list[SharingServer]) -> None:
    """Publish on one server and restore on another, before and after the store was killed and has lost everything."""
    first = open_server(opened, url)
    first.publish()
    second = open_server(opened, url)
    assert second.restore() == len(TOKENS)
    second.publish()
    assert not second.tier.collect_figures().build_json()["written"], "everything was there"
    server.kill()
    with pytest.raises(OSError, match=r"\w"):
        second.restore()
    assert not second.restore(), "it is looked up elsewhere at once"
    server.start()  # with nothing in it
    wait_for(lambda: not second.tier.trouble, 60)
    second.publish()
    assert open_server(opened, url).restore() == len(TOKENS)
    for one in opened:
        one.tier.close()
