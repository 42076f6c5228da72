"""The page's files, as they come with the package: read once, and never from where a request says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path

from attrs import frozen
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

FOLDER = Path(__file__).parent / "static"
PAGE = "/page"  # what a browser gets that asks for `/`; its files are below
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline, nothing from elsewhere, nobody's frame; no text ever becomes markup, whatever a script says.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # kept, but asked for again: the next version's files have the same names
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "Accept",  # a program that asks for `/` gets JSON
    "x-content-type-options": "nosniff",
}


@frozen
class PageFile:
    body: bytes
    type: str
    etag: str


@cache
def files() -> Mapping[str, PageFile]:
    """By path."""
    found = {}
    for file in sorted(FOLDER.iterdir()):
        path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
        body = file.read_bytes()
        found[path] = PageFile(body, TYPES[file.suffix], f'"{blake2b(body, digest_size=16).hexdigest()}"')
    return found


def routes() -> list[Route]:
    return [Route(path, answer, methods=["GET"]) for path in files()]


def meant(scope: Scope, path: str) -> str:
    """The page's own path, where a browser opens `/`."""
    opens = path == "/" and scope["method"] in {"GET", "HEAD"}
    return PAGE if opens and "text/html" in Headers(scope=scope).get("accept", "") else path


async def answer(request: Request) -> Response:
    """Of a path that is one of its files."""
    return answered(files()[request.scope["path"]], request.headers)


def answered(file: PageFile, asked: Headers) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = [one.strip().removeprefix("W/") for one in asked.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers={**headers, "content-type": file.type})
