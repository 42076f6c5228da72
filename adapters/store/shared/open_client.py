"""Opens the client of a store by its URL, with the options of the library."""

from __future__ import annotations

import os
from datetime import timedelta

from adapters.store.shared.folder_client import FolderClient
from adapters.store.shared.object_client import ObjectClient, shorten_error
from adapters.store.shared.store_health import BASE_LIMIT_S
from adapters.store.shared.store_url import INSTALL, StoreUnusable, allows_http, check_url

RETRIES = 2
# Seconds of one attempt's own limits. An operation is cut off by `compute_limit` in any case.
CONNECT_S = 1.0


def open_client(url: str) -> ObjectClient:
    """Return a client for a URL. Nothing is asked of the store yet. Raises StoreUnusable."""
    check_url(url)
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415
        from obstore.store import from_url  # noqa: PLC0415
    except ImportError as error:
        raise StoreUnusable(INSTALL) from error
    try:
        if url.startswith("file:"):
            return FolderClient(url, from_url(url, mkdir=True))
        store = from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=60),
                "allow_http": allows_http(os.environ),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=BASE_LIMIT_S),
                "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=400)},
            },
        )
        return ObjectClient(url, store)
    except (BaseError, ValueError, OSError) as error:
        raise StoreUnusable(shorten_error(error)) from error
