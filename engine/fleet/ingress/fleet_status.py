"""The ingress answers about the whole fleet here: its replicas, its health, and the metrics of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
from attrs import define
from starlette.responses import JSONResponse, Response

from adapters.metrics import Metrics
from engine.fleet.ingress.held_answer import RawHeaders, ReplicaLost
from engine.fleet.ingress.merge_metrics import merge_metrics
from engine.fleet.ingress.relay import CREDENTIALS, ReplicaClient
from engine.fleet.ingress.replica_picker import Replica, ReplicaPicker

ASK_HEADERS = CREDENTIALS | {b"origin"}
ASK_S = 5.0  # a replica that takes longer is shown as one that does not answer
SHOWN = ("state", "queue", "slots_busy", "total_slots", "troubles", "totals", "model")
INGRESS = "ingress"  # the value of the label for the ingress's own metrics


@define(eq=False)
class FleetStatus:
    """Answers about all replicas. metrics: of this ingress."""

    picker: ReplicaPicker
    relay: ReplicaClient
    metrics: Metrics

    async def show_fleet(self, headers: RawHeaders) -> Response:
        """List the replicas with a part of what each shows at `/props`."""
        replicas = {replica.id: replica for replica in await self.picker.list_replicas()}
        answers = await self._ask_replicas("/props", headers)
        shown = list[dict[str, Any]]()
        for name, (status, _, body) in answers.items():
            if status == 401:
                return Response(body, status, media_type="application/json")
            props = msgspec.json.decode(body) if status == 200 else {"state": "unreachable"}
            facts = replicas[name].facts
            about = {"id": name, "in_flight": self.picker.in_flight[name], "identity": facts.identity}
            identity = {"url": facts.url, "pid": facts.pid}
            shown.append({**about, **identity, **{key: props[key] for key in SHOWN if key in props}})
        return JSONResponse({"object": "list", "data": shown})

    async def show_health(self, headers: RawHeaders, retry_after_s: int) -> Response:
        """Tell whether any replica takes requests: 200 or 503."""
        answers = await self._ask_replicas("/health", headers)
        states = {name: describe_health(status, body) for name, (status, _, body) in answers.items()}
        is_up = any(status == 200 for status, _, _ in answers.values())
        overall = "ok" if states and set(states.values()) == {"ok"} else "degraded" if is_up else "unavailable"
        retry = {} if is_up else {"retry-after": str(retry_after_s)}
        return JSONResponse({"status": overall, "replicas": states}, 200 if is_up else 503, retry)

    async def render_metrics(self, headers: RawHeaders) -> Response:
        """Merge the metrics of all replicas and of this ingress."""
        own, kind = self.metrics.render()
        texts = {INGRESS: own.decode()}
        for name, (status, _, body) in (await self._ask_replicas("/metrics", headers)).items():
            if status == 200:
                texts[name] = body.decode()
        return Response(merge_metrics(texts), headers={"content-type": kind})

    async def _ask_replicas(self, target: str, headers: RawHeaders) -> Mapping[str, tuple[int, RawHeaders, bytes]]:
        """Return each replica's answer to a GET. Status 0: it did not answer."""
        kept = [(name, value) for name, value in headers if name in ASK_HEADERS]
        replicas = await self.picker.list_replicas()
        answers: dict[str, tuple[int, RawHeaders, bytes]] = {replica.id: (0, (), b"") for replica in replicas}

        async def ask(replica: Replica) -> None:
            try:
                with anyio.move_on_after(ASK_S):
                    answers[replica.id] = await self.relay.get(replica.facts, target, kept)
            except ReplicaLost:
                self.picker.shun(replica.id)

        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(ask, replica)
        return answers


def describe_health(status: int, body: bytes) -> str:
    """Return the word for a replica's health."""
    return str(msgspec.json.decode(body)["status"]) if status else "unreachable"
