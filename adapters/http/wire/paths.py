"""Map the paths that clients write to the paths that are served: with or without /v1, and with slashes at the end."""

from __future__ import annotations

from collections.abc import Collection

VERSION = "/v1"


def canonical_path(path: str, known: Collection[str]) -> str:
    """Return the served path that a client means. An unknown path stays as it is, but for slashes at its end."""
    bare = path.rstrip("/") or "/"
    for meant in (bare, VERSION + bare, bare.removeprefix(VERSION)):
        if meant in known:
            return meant
    return VERSION + bare if bare.startswith(("/models/", "/responses/")) else bare
