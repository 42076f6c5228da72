"""Finds a cache folder for a replica: the first one that no other replica on this machine uses.

Only one process can use a cache folder. Replicas come and go, and their ids in Ray Serve are new each time. So folders
are numbered, and a replica takes the first free number. A replica that replaces a dead one finds its files so.

The folder above must be ours alone as well: who may write there may put other folders in the place of these.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from adapters.store.files.private_folder import FolderInUse, FolderUnusable, PrivateFolder, check_private
from engine.settings.paths import find_user_folder
from engine.settings.server_options import CacheOptions
from engine.settings.user_error import UserError


def claim_folder(cache: CacheOptions) -> PrivateFolder | None:
    """Claim a folder until the process ends; None if nothing is kept on disk. Raises UserError."""
    if not (cache.uses_disk and cache.kv_cache_budget):
        return None
    above = cache.kv_cache_dir or find_user_folder() / "fleet"
    try:
        above.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(above, above.stat())
        return next(claim for number in count() if (claim := try_folder(above / f"replica-{number}")) is not None)
    except FolderUnusable as error:
        raise UserError(f"--kv-cache-dir {error}") from error
    except OSError as error:
        raise UserError(f"--kv-cache-dir {above}: {error.strerror}") from error


def try_folder(path: Path) -> PrivateFolder | None:
    """Claim a folder; None if another process has it. Raises FolderUnusable."""
    try:
        return PrivateFolder.open(path)
    except FolderInUse:
        return None
