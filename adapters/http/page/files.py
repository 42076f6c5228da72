"""Serve the files of the page. They come with the package, are read once, and no request chooses a path on disk."""

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
PAGE = "/page"  # the path of the page that a browser gets for `/`; its files are below it
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing inline, nothing from elsewhere, no frame of other pages. Text never becomes markup, whatever a script does.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # browsers check again, as the next version's files have the same names
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
def load_files() -> Mapping[str, PageFile]:
    """Return all files by their paths."""
    found = {}
    for file in sorted(FOLDER.iterdir()):
        path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
        body = file.read_bytes()
        found[path] = PageFile(body, TYPES[file.suffix], f'"{blake2b(body, digest_size=16).hexdigest()}"')
    return found


def make_routes() -> list[Route]:
    return [Route(path, answer_file, methods=["GET"]) for path in load_files()]


def page_path(scope: Scope, path: str) -> str:
    """Return the page's own path if a browser opens `/`; any other path stays."""
    opens = path == "/" and scope["method"] in {"GET", "HEAD"}
    return PAGE if opens and "text/html" in Headers(scope=scope).get("accept", "") else path


async def answer_file(request: Request) -> Response:
    """Answer a request for one of the files."""
    return make_file_response(load_files()[request.scope["path"]], request.headers)


def make_file_response(file: PageFile, request_headers: Headers) -> Response:
    """Return the file, or 304 if the client has it already."""
    headers = {**HEADERS, "etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request_headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers={**headers, "content-type": file.type})
