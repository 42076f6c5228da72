"""The actor around the server of a replica. Ray and the process are replaced; the server is on a real socket."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from attrs import evolve

from engine.fleet.replica import engine_replica
from engine.fleet.replica.engine_replica import EngineReplica
from engine.fleet.replica_facts import ReplicaFacts
from tests.http.conftest import served

FACTS = ReplicaFacts("", "0" * 32, 8, "small", 4096, 300, 4, ())
REPLICA = SimpleNamespace(replica_id=SimpleNamespace(unique_id="abc"))
KEY = "the key of the file"


async def test_the_actor_asks_its_server_with_the_key_of_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nanother key\n")
    keys.chmod(0o600)
    monkeypatch.setattr(engine_replica.serve, "get_replica_context", lambda: REPLICA)
    # A fake engine has no facts. Its server refuses the questions for them like any other without a key.
    monkeypatch.setattr(ReplicaFacts, "from_answers", staticmethod(lambda url, *_: evolve(FACTS, url=url)))
    async with served(folder, api_keys=(KEY, "another key")) as site:
        url = str(site.client.base_url).rstrip("/")
        server = SimpleNamespace(url=url, process=SimpleNamespace(pid=7), watch=lambda _: None, stop=lambda _: None)
        monkeypatch.setattr(engine_replica, "start_server", lambda *_: server)
        values = {"api_key_file": str(keys), "kv_cache_budget": 0}
        replica = await anyio.to_thread.run_sync(lambda: EngineReplica(values, is_local=True))
        assert (replica.facts.url, replica.facts.pid) == (url, 7)
        await anyio.to_thread.run_sync(replica.check_health)
        replica.client.close()
