"""Finds a cache folder for a replica: the first one that no other replica on this machine uses.

Only one process can use a cache folder. Replicas come and go, and their ids in Ray Serve are new each time. So folders
are numbered, and a replica takes the first free number. A replica that replaces a dead one finds its files so.
"""

from __future__ import annotations

from itertools import count

from adapters.store.files.private_folder import FolderInUse, FolderUnusable, PrivateFolder
from engine.settings.paths import find_user_folder
from engine.settings.server_options import CacheOptions
from engine.settings.user_error import UserError


def claim_folder(cache: CacheOptions) -> PrivateFolder | None:
    """Claim a folder until the process ends; None if nothing is kept on disk. Raises UserError."""
    if not (cache.uses_disk and cache.kv_cache_budget):
        return None
    above = cache.kv_cache_dir or find_user_folder() / "fleet"
    for number in count():
        try:
            return PrivateFolder.open(above / f"replica-{number}")
        except FolderInUse:
            continue
        except FolderUnusable as error:
            raise UserError(f"--kv-cache-dir {error}") from error
    raise AssertionError("a number is free")
