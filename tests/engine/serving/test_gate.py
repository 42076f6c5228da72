"""Tests of the answers that a server gives while its model loads."""

from __future__ import annotations

import httpx

from adapters.http.page import files
from engine.serving.serve import LoadingGate


async def test_the_page_is_there_before_the_model_and_nothing_else_is() -> None:
    transport = httpx.ASGITransport(LoadingGate())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        page = await client.get("/", headers={"accept": "text/html"})
        assert (page.status_code, page.content) == (200, files.load_files()[files.PAGE].body)
        assert page.headers["content-security-policy"] == files.POLICY
        assert (await client.get("/page/app.js")).status_code == 200
        for method, path in (
            ("GET", "/"),
            ("GET", "/events"),
            ("GET", "/health"),
            ("POST", "/page"),
            ("GET", "/page/x"),
        ):
            refused = await client.request(method, path)
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, "Loading model")
            assert refused.headers["retry-after"] == "1"
