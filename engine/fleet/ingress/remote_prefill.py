"""Has a prompt read by one replica for another, where the router has decided so (`states/routing/remote_prefill.py`).

The replica that will answer describes the prompt (PROMPT_PATH), since only there the tokens of all earlier answers may
be known. The reader gets the description at READ_PATH, and answers when the rows are in the shared tier. Then the
replica that will answer lists that tier (REFRESH_PATH), and gets the request itself. All three paths get the
credentials of the client, so the rows carry the salt of its key.

Whatever fails costs time only: the request goes to its replica all the same, which reads what it lacks. The detour has
a limit of time, since a client waits meanwhile without a sign of life.
"""

from __future__ import annotations

from typing import Literal, TypeAlias
from urllib.parse import quote

import anyio
import msgspec
from attrs import define
from prometheus_client import Counter

from engine.core.fleet_paths import API_PARAMETER, PROMPT_PATH, READ_PATH, REFRESH_PATH
from engine.fleet.ingress.held_answer import RawHeaders, ReplicaLost
from engine.fleet.ingress.relay import CREDENTIALS, AskedRequest, ReplicaClient
from engine.fleet.ingress.replica_picker import Replica, ReplicaChoice, ReplicaPicker
from states.routing.choose_replica import RemotePrefill

# `read` is the only good outcome. `not_described`: the answering replica cannot say what is to be read. `useless`: the
# reader has published no more than the answering replica had already.
PrefillOutcome: TypeAlias = Literal[
    "read", "not_described", "unknown", "lost", "refused", "useless", "not_refreshed", "timed_out"
]
PATIENCE = 3  # times the estimate of the router
LEAST_LIMIT_S = 5.0
MOST_LIMIT_S = 60.0  # many clients and proxies close a connection that is silent for longer


class ReadingReport(msgspec.Struct):
    """The answer of a reader. published_tokens: of the prompt that any replica can restore now."""

    prompt_tokens: int
    published_tokens: int


@define(eq=False)
class RemotePrefills:
    """Carries out prefills elsewhere. outcomes: counts them by reader and outcome."""

    picker: ReplicaPicker
    relay: ReplicaClient
    outcomes: Counter

    async def read_elsewhere(self, asked: AskedRequest, choice: ReplicaChoice) -> str:
        """Have the prompt read as the router has decided. Return the id of the reader; "" where the prompt was not
        read, or the router has decided nothing.
        """
        prefill = choice.prefill
        if prefill is None:
            return ""
        outcome: PrefillOutcome = "timed_out"
        with anyio.move_on_after(compute_limit(prefill)):
            outcome = await self._read(asked, choice.replica, prefill)
        self.outcomes.labels(prefill.replica, outcome).inc()
        return prefill.replica if outcome == "read" else ""

    async def _read(self, asked: AskedRequest, target: Replica, prefill: RemotePrefill) -> PrefillOutcome:
        reader = await self._find(prefill.replica)
        if reader is None:
            return "unknown"
        path = f"{PROMPT_PATH}?{API_PARAMETER}={quote(asked.path)}"
        order = await self._ask_target(target, path, asked.headers, asked.body)
        if order is None:
            return "not_described"
        credentials = [(name, value) for name, value in asked.headers if name in CREDENTIALS]
        try:
            with self.picker.count_request(reader.id):
                status, report = await self.relay.post(reader.facts, READ_PATH, credentials, order)
        except ReplicaLost:
            self.picker.shun(reader.id)
            return "lost"
        if status != 200:
            return "refused"
        if count_published_tokens(report) <= prefill.held:
            return "useless"
        refreshed = await self._ask_target(target, REFRESH_PATH, credentials, b"")
        return "not_refreshed" if refreshed is None else "read"

    async def _ask_target(self, target: Replica, path: str, headers: RawHeaders, body: bytes) -> bytes | None:
        """Return the answer of the replica that will answer the request; None if it has none.

        A replica that is lost is not noted here: sending it the request itself finds that out as well.
        """
        try:
            status, answer = await self.relay.post(target.facts, path, headers, body)
        except ReplicaLost:
            return None
        return answer if status == 200 else None

    async def _find(self, name: str) -> Replica | None:
        """Return the facts of a reader. They are unknown until it was chosen or listed once."""
        if (known := self.picker.find(name)) is not None:
            return known
        return next((replica for replica in await self.picker.list_replicas() if replica.id == name), None)


def count_published_tokens(body: bytes) -> int:
    """Return the tokens that a reader has published; 0 if its answer cannot be read."""
    try:
        return msgspec.json.decode(body, type=ReadingReport).published_tokens
    except msgspec.MsgspecError:
        return 0


def compute_limit(prefill: RemotePrefill) -> float:
    """Return the seconds that a prefill elsewhere may take: PATIENCE times the estimate, within two limits."""
    return min(MOST_LIMIT_S, max(LEAST_LIMIT_S, PATIENCE * prefill.published_ns / 1e9))
