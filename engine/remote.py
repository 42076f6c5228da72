"""The daemons that the shards of a target are in: launched or reached, and sure to be of the same model."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import engine
from adapters.models.checkpoint import Checkpoint
from adapters.models.shard import Shard
from adapters.remote.dial import AtAddress, Dial, Launched
from adapters.remote.peer import ExpectedModel, Peer
from adapters.remote.shard import RemoteShard
from effects.ports import RowsLost
from engine.options import Options
from engine.plan import Where
from engine.refusal import Refusal
from engine.secret import VARIABLE, shared_secret


def connected(options: Options, folder: Path, checkpoint: Checkpoint) -> tuple[Peer | None, ...]:
    """Of each shard that is in another process. All start before the first is waited for. Raises Refusal."""
    peers = tuple(peer_of(one, options, folder, checkpoint) for one in options.devices)
    try:
        for peer in peers:
            if peer is not None:
                peer.dial.begin()
        for peer in peers:
            if peer is not None:
                peer.connect()
    except RowsLost as error:
        closed(peers)
        raise Refusal(f"--target-devices: {error}") from error
    except OSError as error:
        closed(peers)
        what = f"{options.target_shard_ipc_python or sys.executable}: {error.strerror or error}"
        raise Refusal(f"--target-devices: a process for a shard could not be started: {what}") from error
    except BaseException:
        closed(peers)
        raise
    return peers


def closed(peers: Sequence[Peer | None]) -> None:
    for peer in peers:
        if peer is not None:
            peer.close()


def peer_of(where: Where, options: Options, folder: Path, checkpoint: Checkpoint) -> Peer | None:
    if not where.remote:
        return None
    from engine.shard import described  # noqa: PLC0415 - only where there is one

    secret = secrets.token_hex(32) if where.launched else shared_secret(options.shard_secret_file)
    dial: Dial = AtAddress(where.name, where.address) if where.address else launched(where, options, folder, secret)
    return Peer(dial, secret.encode(), engine.__version__, ExpectedModel(*described(checkpoint)))


def place_of(part: Shard) -> str:
    """Where its layers are computed, as the user says it."""
    return part.peer.dial.name if isinstance(part, RemoteShard) else str(part.device)


def placement(parts: Sequence[Shard]) -> str:
    """Which layers are where, in a word."""
    return ",".join(f"{part.layers.start}-{part.layers.stop - 1}@{place_of(part)}" for part in parts)


def shown(part: Shard) -> Mapping[str, Any]:
    """For /props. error: what the last loss of it was."""
    remote = part.peer if isinstance(part, RemoteShard) else None
    return {
        "layers": [part.layers.start, part.layers.stop],
        "device": place_of(part),
        "process": os.getpid() if remote is None or remote.facts is None else remote.facts.pid,
        "bytes": part.memory(),
        "error": "" if remote is None else remote.error,
        "restarts": 0 if remote is None else remote.restarts,
    }


def hops(parts: Sequence[Shard]) -> Mapping[str, Mapping[str, float]]:
    """Of shards in other processes, by their layers: what forwards there have cost."""
    remote = [part for part in parts if isinstance(part, RemoteShard)]
    return {f"{part.layers.start}-{part.layers.stop - 1}": part.peer.figures() for part in remote}


def launched(where: Where, options: Options, folder: Path, secret: str) -> Launched:
    """The secret is in its environment, which other users cannot read, and not in its command line."""
    python = options.target_shard_ipc_python
    words = [str(python or sys.executable), "-P", "-m", "engine", "shard", str(folder.resolve())]
    words += ["--device", where.device, "--threads", str(options.threads)]
    return Launched(where.name, words, {VARIABLE: secret, **({} if python else importable())})


def importable() -> Mapping[str, str]:
    """Where this interpreter has found us, for another one of the same."""
    root, before = str(Path(engine.__file__).parents[1]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, *([before] if before else [])])}
