"""Check who may call, before any body is read. This is the outermost layer, and it also answers for bugs.

All checks use `scope["path"]`. A path that is not public needs a key if keys are set.
* Host: a page that rebinds its DNS name to this address still sends its own name, so only known names are answered.
  Addresses are answered as well if the server listens on every interface.
* Origin: a page of another origin is refused, whatever it sends, unless its origin or every origin is allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import time
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.http.answer.access_log import ARRIVED, CALLER, LOG_IDS, NOTE, describe_refusal
from adapters.http.apis.registry import make_error_response, needs_history
from adapters.http.edge_options import AccessOptions
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.page import files
from adapters.http.wire.address import MAX_HEAD_BYTES
from adapters.http.wire.errors import ApiError
from adapters.http.wire.paths import canonical_path
from adapters.http.wire.plain_error import HEAD_TOO_LARGE, TARGET_TOO_LONG, TOO_LARGE, TOO_LONG
from adapters.metrics import Metrics

log = logging.getLogger("rekindle.http")
PUBLIC_PATHS = frozenset({"/health", *files.load_files()})  # the page is public, its data is not
EXPOSED_HEADERS = "x-request-id, request-id, retry-after"
PREFLIGHT = {"access-control-allow-methods": "GET, POST, DELETE, OPTIONS", "access-control-max-age": "600"}


class Guard:
    """An ASGI middleware that refuses requests which may not be made, logs all requests, and counts them."""

    def __init__(
        self,
        app: ASGIApp,
        access: AccessOptions,
        metrics: Metrics,
        paths: frozenset[str],
        history_loader: HistoryLoader | None,
    ) -> None:
        self.app = app
        self.access = access
        self.metrics = metrics
        self.paths = paths
        self.history_loader = history_loader
        self.keys = tuple(digest_key(key.encode()) for key in access.api_keys)
        self.listens_everywhere = any(is_address(host, "is_unspecified") for host in access.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.monotonic()
        status = 0
        asked_path = scope["path"]
        scope = {**scope, "path": files.page_path(scope, canonical_path(asked_path, self.paths)), ARRIVED: start}
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def send_watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if origin is not None and self.is_allowed(origin):
                    shared = {"access-control-allow-origin": origin, "access-control-expose-headers": EXPOSED_HEADERS}
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
                await Response(headers=allowed)(scope, receive, send_watched)
                return
            scope[CALLER] = self.check_key(scope["path"], headers)
            if self.history_loader is not None and needs_history(scope["path"]):
                await self.history_loader.wait()
            await self.app(scope, receive, send_watched)
        except ApiError as error:
            # The connection ends, as the request's body stays unread.
            refusal = error.add_headers({"connection": "close"})
            scope[NOTE] = describe_refusal(refusal)
            await make_error_response(scope, refusal)(scope, receive, send_watched)
        except Exception:
            log.exception("a bug in the HTTP edge")
            if status:
                raise
            failed = ApiError(500, "The server failed. Its log says why.", "server_error", code="internal_error")
            await make_error_response(scope, failed)(scope, receive, send_watched)
        finally:
            self._log_request(scope, asked_path, status, time.monotonic() - start)

    def _log_request(self, scope: Scope, asked_path: str, status: int, seconds: float) -> None:
        """Count a request that has ended, and write its line to the log. asked_path: as the client wrote it."""
        path = scope["path"] if scope["path"] in self.paths else "other"
        self.metrics.count_response(path, status)
        level = logging.DEBUG if scope["method"] != "POST" and status < 400 else logging.INFO
        note = scope.get(NOTE, "")
        if path == "other":
            note = f" path={asked_path[:100]!a}{note}"
        # What a client chose is in this line as a method, which h11 has checked, or as an unknown path, escaped.
        log.log(level, "%s %s %d %.3fs%s", scope["method"], path, status, seconds, note, extra=scope.get(LOG_IDS))

    def check_host(self, headers: Headers) -> None:
        host = parse_hostname(headers.get("host", ""))
        known = host is not None and (is_loopback(host) or {host, "*"} & set(self.access.allowed_hosts))
        # A page can rebind a name, but never an address.
        if not known and not (self.listens_everywhere and host is not None and is_address(host)):
            message = "This server does not answer to that Host name. Allow it with --allow-host."
            raise ApiError(421, message, code="misdirected_request")

    def is_allowed(self, origin: str) -> bool:
        return bool({origin.lower(), "*"} & set(self.access.allowed_origins))

    def check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse pages of other origins. Pages that this server's name brought, over the same protocol, may call."""
        origin = headers.get("origin")
        own = f"{scope['scheme']}://{headers.get('host', '')}".lower()
        if origin is not None and origin.lower() != own and not self.is_allowed(origin):
            message = "Pages of other origins may not call this server. Allow them with --allow-origin."
            raise ApiError(403, message, "permission_error", code="origin")

    def check_key(self, path: str, headers: Headers) -> str:
        """Return a name for the caller's key; an empty one if there are no keys. Raises ApiError 401."""
        if not self.keys or path in PUBLIC_PATHS:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # Every pair is compared, so the time reveals nothing.
        digests = [digest_key(key.encode("latin-1", "replace")) for key in given]
        matches = [ours for theirs in digests for ours in self.keys if hmac.compare_digest(theirs, ours)]
        if not matches:
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")
        return digest_key(matches[0]).hex()


def check_head(scope: Scope, headers: Headers) -> None:
    """Refuse heads that are too large, and bodies of two lengths. h11 only limits a head that comes in several
    pieces.
    """
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "Send either Content-Length or Transfer-Encoding, not both."
        # A proxy that believes the other one sees a different next request.
        raise ApiError(400, message, code="bad_http")
    size = len(scope["raw_path"]) + len(scope["query_string"])
    if size > MAX_HEAD_BYTES:
        raise ApiError(TOO_LONG, TARGET_TOO_LONG, code="target_too_long")
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise ApiError(TOO_LARGE, HEAD_TOO_LARGE, code="head_too_large")


def digest_key(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()


def parse_hostname(host: str) -> str | None:
    """Return the name in a Host header, without its port; None if it is not a host."""
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


@lru_cache(256)
def is_address(host: str, kind: str | None = None) -> bool:
    """Return whether a host is an IP address. kind: a property that it must have, such as `is_loopback`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return kind is None or bool(getattr(address, kind))
