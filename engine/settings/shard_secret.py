"""The secret that a server and the processes of its shards share.

It comes from a file or the environment, never from a command line.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
VARIABLE = "REKINDLE_SHARD_SECRET"
# In characters. A shorter secret could be computed from overheard messages.
LEAST_SECRET = 16
MOST = 1 << 16  # bytes of the file


def find_shared_secret(file: Path | None) -> str:
    """Return the secret. Raises UserError if there is none, or one that could be guessed."""
    where = VARIABLE
    found = os.environ.get(VARIABLE, "")
    if file is not None:
        where = f"--shard-secret-file {file}"
        found = read_secret(file)
    if not found:
        raise UserError(
            f"a shard at tcp:// needs a secret: set {VARIABLE} or --shard-secret-file to one of at "
            f"least {LEAST_SECRET} characters, the same at both ends"
        )
    if len(found) < LEAST_SECRET:
        raise UserError(f"{where}: a secret of {len(found)} characters; accepted: at least {LEAST_SECRET}")
    return found


def read_secret(file: Path) -> str:
    try:
        with file.open("rb") as source:
            about = os.fstat(source.fileno())
            data = source.read(MOST + 1)
        text = data.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--shard-secret-file {file}: {getattr(error, 'strerror', None) or 'is no text'}") from error
    if len(data) > MOST:
        raise UserError(f"--shard-secret-file {file}: larger than {MOST >> 10} KiB; accepted: one secret")
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o077:
        log.warning("--shard-secret-file %s: other users can read it; run `chmod 600` on it", file)
    return text
