"""Who may call: the outermost layer, before any body is read. Also the last resort for bugs.

Everything is decided on `scope["path"]`, and what is not named public needs a key where keys are set.
* Host: a page that rebinds its DNS name to this address still sends its own name, so only known names are answered,
  and addresses where every interface is listened on.
* Origin: a page of another origin is refused, whatever it sends, unless it was allowed by name or all were.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.http.answer.access_log import ABOUT, ARRIVED, CALLER, NOTE, refused
from adapters.http.apis.registry import error_response, refers
from adapters.http.edge_options import EdgeOptions
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.page import files
from adapters.http.wire.address import MAX_HEAD_BYTES
from adapters.http.wire.errors import ApiError
from adapters.http.wire.paths import canonical
from adapters.metrics import Metrics

log = logging.getLogger("rekindle.http")
PUBLIC = frozenset({"/health", *files.files()})  # the page, not what it shows
EXPOSED = "x-request-id, request-id, retry-after"
PREFLIGHT = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}


class Guard:
    def __init__(
        self, app: ASGIApp, options: EdgeOptions, metrics: Metrics, paths: frozenset[str], recall: HistoryLoader | None
    ) -> None:
        self.app, self.options, self.metrics, self.paths, self.recall = app, options, metrics, paths, recall
        self.keys = tuple(digest(key.encode()) for key in options.api_keys)
        self.everywhere = any(is_address(host, "is_unspecified") for host in options.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, asked = time.monotonic(), 0, scope["path"]
        scope = {**scope, "path": files.meant(scope, canonical(asked, self.paths)), ARRIVED: start}
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if origin is not None and self.is_allowed(origin):
                    shared = {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED}
                    answered = MutableHeaders(scope=message)
                    answered.update(shared)
                    answered.add_vary_header("Origin")
            await send(message)

        try:
            check_head(scope, headers)
            self.check_host(headers)
            self.check_origin(scope, headers)
            if scope["method"] == "OPTIONS" and origin is not None:
                wanted = headers.get("access-control-request-headers", "authorization, content-type")
                allowed = {**PREFLIGHT, "access-control-allow-headers": wanted[:500]}
                await Response(status_code=204, headers=allowed)(scope, receive, watched)
                return
            scope[CALLER] = self.check_key(scope["path"], headers)
            if self.recall is not None and refers(scope["path"]):
                await self.recall.wait()
            await self.app(scope, receive, watched)
        except ApiError as error:
            error.headers = {**error.headers, "connection": "close"}  # its body stays unread
            scope[NOTE] = refused(error)
            await error_response(scope, error)(scope, receive, watched)
        except Exception:
            log.exception("a bug in the HTTP edge")
            if status:
                raise
            failed = ApiError(500, "The server failed. Its log says why.", "server_error", code="internal_error")
            await error_response(scope, failed)(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.count_response(path, status)
            level = logging.DEBUG if scope["method"] != "POST" and status < 400 else logging.INFO
            spent, note = time.monotonic() - start, scope.get(NOTE, "")
            if path == "other":
                note = f" path={asked[:100]!a}{note}"
            # what a client chose is in this line as a method, which h11 has checked, or as an unknown path, escaped
            said = scope["method"], path, status, spent, note
            log.log(level, "%s %s %d %.3fs%s", *said, extra=scope.get(ABOUT))

    def check_host(self, headers: Headers) -> None:
        host = hostname(headers.get("host", ""))
        known = host is not None and (is_loopback(host) or {host, "*"} & set(self.options.allowed_hosts))
        # a page can rebind a name, never an address
        if not known and not (self.everywhere and host is not None and is_address(host)):
            message = "This server does not answer to that Host name. Allow it with --allow-host."
            raise ApiError(421, message, code="misdirected_request")

    def is_allowed(self, origin: str) -> bool:
        return bool({origin.lower(), "*"} & set(self.options.allowed_origins))

    def check_origin(self, scope: Scope, headers: Headers) -> None:
        """Its own pages may call: those that this server's name brought, over the same protocol."""
        origin = headers.get("origin")
        own = f"{scope['scheme']}://{headers.get('host', '')}".lower()
        if origin is not None and origin.lower() != own and not self.is_allowed(origin):
            message = "Pages of other origins may not call this server. Allow them with --allow-origin."
            raise ApiError(403, message, "permission_error", code="origin")

    def check_key(self, path: str, headers: Headers) -> str:
        """Who it is: nobody in particular, where there are no keys."""
        if not self.keys or path in PUBLIC:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # every pair is compared, so that time tells nothing
        digests = [digest(key.encode("latin-1", "replace")) for key in given]
        matches = [ours for theirs in digests for ours in self.keys if hmac.compare_digest(theirs, ours)]
        if not matches:
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")
        return digest(matches[0]).hex()


def check_head(scope: Scope, headers: Headers) -> None:
    """h11 only bounds a head that comes in several pieces, and takes a body of two lengths."""
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "Send either Content-Length or Transfer-Encoding, not both."
        raise ApiError(400, message, code="bad_http")  # who believes the other one sees another next request
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise ApiError(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", code="head_too_large")


def digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()


def hostname(host: str) -> str | None:
    """The name in a Host header, without its port; None if it is no Host."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if parts.path or parts.query or parts.fragment or parts.username is not None:
        return None
    return parts.hostname


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost") or is_address(host, "is_loopback")


def is_address(host: str, kind: str | None = None) -> bool:
    """An IP address, of this kind if one is named."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return kind is None or bool(getattr(address, kind))
