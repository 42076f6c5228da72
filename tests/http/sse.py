"""Reading server-sent events as clients do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

import httpx

from tests.http.conftest import Site


class Reachable(Protocol):
    """A server that a client talks to, in this process or in another one."""

    @property
    def client(self) -> httpx.AsyncClient: ...


async def events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event; comments as they are."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line[6:]
        elif line.startswith(":"):
            yield line


async def stream(site: Reachable, path: str, body: dict[str, Any]) -> tuple[httpx.Response, list[str]]:
    async with site.client.stream("POST", path, json={**body, "stream": True}) as response:
        return response, [event async for event in events(response)]


async def chunks(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Every chunk of a stream that ends well, comments left out."""
    response, found = await stream(site, path, body)
    assert response.status_code == 200, found
    assert found[-1] == "[DONE]", found[-1]
    return [json.loads(event) for event in found[:-1] if not event.startswith(":")]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    """Return the text of one choice, of either API."""
    said = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in said)
