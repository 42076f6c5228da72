"""The rules for URLs of shared stores. Options are checked by them as well, so this module imports nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "gs", "az", "file")
ACCEPTED = "accepted: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder"
INSTALL = "needs the package obstore: pip install 'rekindle[shared]'"
# The variables that name the endpoint of a store, for stores that may be anywhere.
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}


class StoreUnusable(Exception):
    """The store cannot be used from the start. The message is one line that says why."""


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
