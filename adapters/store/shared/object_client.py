"""A client of an object store, with limits of time and our own errors. It and `open_client.py` alone import `obstore`.

Every operation ends within its limit, whatever the store does. A folder has a client of its own (`folder_client.py`).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from attrs import define, frozen

from adapters.store.files.read_run import RunContent
from adapters.store.shared.object_pieces import ObjectPieces
from adapters.store.shared.store_health import compute_limit, compute_patient_limit
from adapters.store.shared.store_url import ENDPOINTS
from adapters.store.shared.thread_calls import start_call

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CAUSE = re.compile(r'^ +(?:message|error): "(.+)",$', re.MULTILINE)  # in the library's structures, the innermost last
RANGE_BYTES = 4 << 20  # what one request reads; a larger object is read by several at once
PAGE = 1000  # names of one answer to a listing
MAX_LISTED = 1 << 20  # objects of a listing; more would take the memory of the server
T = TypeVar("T")


class StoreUnreachable(OSError):
    """An operation failed or took too long. The message is one line."""


class ObjectGone(StoreUnreachable):
    """An object that a listing has shown is not there any more. The store works."""


class ObjectExists(Exception):
    """There is an object of that name already."""


@frozen
class ObjectFacts:
    """An object as a listing shows it. version: differs between two objects of one name. written: by the store."""

    name: str
    size: int
    written: datetime
    version: str


class ReadLimit(Protocol):
    """The limit of a call that reads several times (`call_limit.py`)."""

    def begin(self, size: int) -> None: ...

    def claim(self) -> None: ...


class Folder(Protocol):
    """A store whose objects are files, which functions of ours write and read."""

    async def write_file(self, name: str, size: int, write: Callable[[str, str], T]) -> T:
        """Write an object of this size by a function, on a thread, and return its result.

        write: makes a file of the first name, and gives it the second one when it is whole. Raises as `write_object`.
        """
        ...

    async def read_files(self, read: Callable[[Callable[[str], str], ReadLimit], T]) -> T:
        """Call a function on a thread, and return its result.

        read: gets a function that returns the path of an object of some name, and the limit that it has to obey.
        Raises StoreUnreachable within that limit.
        """
        ...


@define(eq=False)
class ObjectClient:
    """Operations on the objects below one URL. Any thread with a running event loop may call them.

    Each raises StoreUnreachable within its limit; reads raise FileNotFoundError as well.
    """

    url: str
    _store: ObjectStore

    @property
    def folder(self) -> Folder | None:
        """The folder, if the store is one."""
        return None

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
                ObjectFacts(
                    entry["path"], entry["size"], entry["last_modified"], f"{entry['e_tag']} {entry['version']}"
                )
                for entry in page
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

    async def read_content(
        self,
        name: str,
        size: int,
        workers: Executor,
        decode: Callable[[RunContent], T],
        then: Callable[[T], object],
    ) -> T:
        """Call `decode` with the content of an object, and `then` with the result, on one thread. Return the result.

        size: as listed. workers: their threads may be used. Raises what `decode` and `then` raise as well.
        """
        pieces = ObjectPieces(await self.read_object(name, size))

        def read() -> T:
            found = decode(pieces)
            then(found)
            return found

        return await start_call(workers, read)

    async def write_object(self, name: str, parts: Sequence[bytes], *, replace: bool = False) -> None:
        """Write an object; it is there as a whole or not at all. Raises ObjectExists unless it may be replaced."""
        from obstore import put_async  # noqa: PLC0415

        async with limit_time(self, compute_patient_limit(sum(map(len, parts)))), expect_store():
            mode: Literal["overwrite", "create"] = "overwrite" if replace else "create"
            await put_async(self._store, name, iter(parts), mode=mode, use_multipart=False)  # sent without a copy

    async def remove_object(self, name: str) -> None:
        """Remove an object, if it is there."""
        from obstore import delete_async  # noqa: PLC0415

        try:
            async with limit_time(self, compute_patient_limit(0)):
                await delete_async(self._store, name)
        except FileNotFoundError:
            return

    def close(self) -> None:
        """End what the client has started. It is not used any more."""


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


def describe_read_error(error: Exception) -> Exception:
    """Return the error of a read as its caller should see it."""
    gone = isinstance(error, FileNotFoundError)
    return ObjectGone("the run was removed from the shared store") if gone else error


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
