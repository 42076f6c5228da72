"""Which paths there are: as clients write them, with or without /v1 and slashes at the end."""

from __future__ import annotations

from collections.abc import Collection

VERSION = "/v1"


def canonical(path: str, known: Collection[str]) -> str:
    """The path that is meant, as it is known; one that is not known stays as it is, but for slashes at its end."""
    bare = path.rstrip("/") or "/"
    for meant in (bare, VERSION + bare, bare.removeprefix(VERSION)):
        if meant in known:
            return meant
    return VERSION + bare if bare.startswith(("/models/", "/responses/")) else bare
