"""Finds the replica that holds a stored response. Each replica stores the responses that it has given.

An ingress remembers where the responses are that it has relayed. It asks all replicas for any other one, so ingresses
need no common memory, and a response is found again after an ingress was replaced.
"""

from __future__ import annotations

import re
from collections import OrderedDict

import anyio
from attrs import define, field

from adapters.http.apis.openai_responses import PATH
from engine.fleet.ingress.held_answer import HeldAnswer, RawHeaders, ReplicaLost
from engine.fleet.ingress.relay import CREDENTIALS, AskedRequest, ReplicaClient
from engine.fleet.ingress.replica_picker import Replica, ReplicaPicker

MOST_REMEMBERED = 1 << 16  # responses: 20 MB at most
NAMED = re.compile(rb'"(?:previous_response_id|item_reference)"')
RESPONSE_ID = re.compile(rb"resp_[0-9a-f]{24}")


@define(eq=False)
class ResponseHolders:
    """The replicas that hold stored responses, by the ids of these."""

    picker: ReplicaPicker
    relay: ReplicaClient
    _holders: OrderedDict[str, str] = field(factory=OrderedDict, init=False)

    def note_answer(self, asked: AskedRequest, answer: HeldAnswer, replica: Replica) -> None:
        """Remember where the response is that was just relayed."""
        if asked.method == "POST" and asked.path.startswith(PATH) and answer.answer_id:
            self._holders[answer.answer_id.decode()] = replica.id
            while len(self._holders) > MOST_REMEMBERED:
                self._holders.popitem(last=False)

    async def find_holder(self, asked: AskedRequest) -> Replica | None:
        """Return the replica that a request must go to, because it names a stored response. None: any replica."""
        if (name := find_response_name(asked)) is None:
            return None
        replicas = await self.picker.list_replicas()
        holder = self._holders.get(name)
        if (known := next((replica for replica in replicas if replica.id == holder), None)) is not None:
            return known
        return await self._ask_replicas(name, asked.headers, replicas)

    async def _ask_replicas(self, name: str, headers: RawHeaders, replicas: tuple[Replica, ...]) -> Replica | None:
        """Ask all replicas at once for a response. Return the one that has it."""
        kept = [(key, value) for key, value in headers if key in CREDENTIALS]
        found = list[Replica]()

        async def ask(replica: Replica) -> None:
            try:
                status, _, _ = await self.relay.get(replica.facts, f"{PATH}/{name}", kept)
            except ReplicaLost:
                return
            if status == 200:
                found.append(replica)

        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(ask, replica)
        return next(iter(found), None)


def find_response_name(asked: AskedRequest) -> str | None:
    """Return the id of the stored response that a request names, in its path or in its body."""
    if not asked.path.startswith(PATH):
        return None
    where = asked.body if asked.method == "POST" and NAMED.search(asked.body) else asked.path.encode()
    name = RESPONSE_ID.search(where)
    return name[0].decode() if name else None
