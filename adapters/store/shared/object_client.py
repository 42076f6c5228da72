"""A client of an object store, with limits of time and our own errors. The only module that imports `obstore`.

Every operation ends within its limit, whatever the store does. `file://` folders are stores like any other.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from attrs import define, frozen

from adapters.store.shared.store_health import BASE_LIMIT_S, compute_limit, compute_patient_limit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
ACCEPTED = "accepted: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder"
INSTALL = "needs the package obstore: pip install 'rekindle[shared]'"
# The variables that name the endpoint of a store, for stores that may be anywhere.
ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
CAUSE = re.compile(r'^ +(?:message|error): "(.+)",$', re.MULTILINE)  # in the library's structures, the innermost last
RANGE_BYTES = 4 << 20  # what one request reads; a larger object is read by several at once
RETRIES = 2
# Seconds of one attempt's own limits. An operation is cut off by `compute_limit` in any case.
CONNECT_S = 1.0
PAGE = 1000  # names of one answer to a listing
MAX_LISTED = 1 << 20  # objects of a listing; more would take the memory of the server


class StoreUnusable(Exception):
    """The store cannot be used from the start. The message is one line that says why."""


class StoreUnreachable(OSError):
    """An operation failed or took too long. The message is one line."""


class ObjectExists(Exception):
    """There is an object of that name already."""


@frozen
class ObjectFacts:
    """An object as a listing shows it. version: differs between two objects of one name. written: by the store."""

    name: str
    size: int
    written: datetime
    version: str


@define(eq=False)
class ObjectClient:
    """Operations on the objects below one URL. Any thread with a running event loop may call them.

    Each raises StoreUnreachable within its limit; reads raise FileNotFoundError as well.
    """

    url: str
    _store: ObjectStore

    @property
    def place(self) -> str:
        """The URL of the store, with its endpoint if the environment names one."""
        variables = ENDPOINTS.get(urlsplit(self.url).scheme, ())
        endpoint = next((os.environ[name] for name in variables if os.environ.get(name)), "")
        return f"{self.url} at {endpoint}" if endpoint else self.url

    async def list_objects(self, folder: str) -> list[ObjectFacts]:
        """Return all objects in a folder and below it."""
        from obstore import list as list_all  # noqa: PLC0415

        found = list[ObjectFacts]()
        stream = list_all(self._store, folder, chunk_size=PAGE)
        while True:  # each page has a limit of its own
            async with limit_time(self, compute_patient_limit(0)), expect_store():
                page = await anext(stream, None)
            if page is None or len(found) > MAX_LISTED:
                return found
            found += [
                ObjectFacts(one["path"], one["size"], one["last_modified"], f"{one['e_tag']} {one['version']}")
                for one in page
            ]

    async def list_folders(self) -> list[str]:
        """Return the names of the folders at the top."""
        from obstore import list_with_delimiter_async  # noqa: PLC0415

        async with limit_time(self, compute_patient_limit(0)), expect_store():
            return [*(await list_with_delimiter_async(self._store))["common_prefixes"]]

    async def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Return the bytes `[start, stop)`, or as many of them as there are."""
        from obstore import get_range_async  # noqa: PLC0415

        async with limit_time(self, compute_limit(stop - start)):
            return memoryview(await get_range_async(self._store, name, start=start, end=stop))

    async def read_object(self, name: str, size: int) -> list[memoryview]:
        """Return the content in pieces of RANGE_BYTES, which are read at the same time. size: as listed.

        Of an object that has another size now, nothing is read: there is one piece without content.
        """
        spans = split_ranges(size)
        if len(spans) == 1:
            return [await self._read_whole(name, size)]
        return [*await asyncio.gather(*(self.read_range(name, *span) for span in spans))]

    async def _read_whole(self, name: str, size: int) -> memoryview:
        """Read a small object without naming a range, which servers answer more quickly."""
        from obstore import get_async  # noqa: PLC0415

        async with limit_time(self, compute_limit(size)):
            found = await get_async(self._store, name)
            return memoryview(await found.bytes_async() if found.meta["size"] == size else b"")

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        """Write an object; it is there as a whole or not at all. Raises ObjectExists unless it may be replaced."""
        from obstore import put_async  # noqa: PLC0415

        async with limit_time(self, compute_patient_limit(sum(map(len, parts)))), expect_store():
            await put_async(
                self._store, name, b"".join(parts), mode="overwrite" if replace else "create", use_multipart=False
            )

    async def remove_object(self, name: str) -> None:
        """Remove an object, if it is there."""
        from obstore import delete_async  # noqa: PLC0415

        try:
            async with limit_time(self, compute_patient_limit(0)):
                await delete_async(self._store, name)
        except FileNotFoundError:
            return


@asynccontextmanager
async def limit_time(client: ObjectClient, limit_s: float) -> AsyncIterator[None]:
    """Give an operation its time, and turn the library's errors into ours."""
    from obstore.exceptions import AlreadyExistsError, BaseError  # noqa: PLC0415

    try:
        async with asyncio.timeout(limit_s):
            yield
    except AlreadyExistsError as error:
        raise ObjectExists from error
    except FileNotFoundError as error:
        raise FileNotFoundError(shorten_error(error)) from error
    except TimeoutError as error:
        raise StoreUnreachable(f"no answer within {limit_s:.1f} s from {client.place}") from error
    except (BaseError, OSError) as error:
        raise StoreUnreachable(shorten_error(error)) from error


@asynccontextmanager
async def expect_store() -> AsyncIterator[None]:
    """Raise StoreUnreachable where something is not found although no object was asked for: there is no such bucket."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnreachable(shorten_error(error)) from error


def shorten_error(error: Exception) -> str:
    """Return the first line of an error, and the innermost cause that the library's own structures behind it name."""
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0][:300]
    causes = CAUSE.findall(text)
    return f"{line}: {causes[-1][:100]}" if causes else line


def split_ranges(size: int) -> list[tuple[int, int]]:
    """Return the spans of an object that are read by one request each. A short rest belongs to the last one."""
    count = max(1, (size + RANGE_BYTES // 2) // RANGE_BYTES)
    edges = [number * RANGE_BYTES for number in range(count)] + [size]
    return list(pairwise(edges))


def open_client(url: str) -> ObjectClient:
    """Return a client for a URL. Nothing is asked of the store yet. Raises StoreUnusable."""
    check_url(url)
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError as error:
        raise StoreUnusable(INSTALL) from error
    options: dict[str, Any] = {}
    if not url.startswith("file:"):
        backoff = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=400)}
        retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=BASE_LIMIT_S), "backoff": backoff}
        timeouts = {"connect_timeout": timedelta(seconds=CONNECT_S), "timeout": timedelta(seconds=60)}
        options = {"client_options": {**timeouts, "allow_http": allows_http(os.environ)}, "retry_config": retry}
    else:
        options = {"mkdir": True}
    try:
        return ObjectClient(url, from_url(url, **options))
    except (BaseError, ValueError, OSError) as error:
        raise StoreUnusable(shorten_error(error)) from error


def allows_http(environment: Mapping[str, str]) -> bool:
    """Return whether a store may be asked without encryption: its endpoint says so, or a variable for it does."""
    endpoints = (environment.get(name, "") for names in ENDPOINTS.values() for name in names)
    allowed = (environment.get(f"{store}_ALLOW_HTTP", "").lower() for store in ("AWS", "GOOGLE", "AZURE"))
    return "true" in allowed or any(endpoint.startswith("http://") for endpoint in endpoints)


def check_url(url: str) -> None:
    """Raise StoreUnusable if a URL cannot name a store. It is also called where options are read."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StoreUnusable(f"{error}; {ACCEPTED}") from error
    if parts.scheme not in SCHEMES:
        raise StoreUnusable(f"{url[:60]!r} is no store; {ACCEPTED}")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise StoreUnusable(f"a store has no user, query or fragment in its URL; {ACCEPTED}")
    if parts.scheme == "file" and (parts.netloc or not Path(unquote(parts.path)).is_absolute()):
        raise StoreUnusable(f"{url[:60]!r} is no folder; {ACCEPTED}")
    if parts.scheme != "file" and not parts.netloc:
        raise StoreUnusable(f"{url[:60]!r} names no bucket; {ACCEPTED}")
