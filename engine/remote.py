"""The daemons that a target's shards and its draft are in: launched or reached, and sure to be of the same model."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

import engine
from adapters.device.proposer import DraftModel
from adapters.models.checkpoint import Checkpoint
from adapters.models.shard import Shard
from adapters.remote.dial import AtAddress, Dial, Launched
from adapters.remote.draft import DRAFT_DEADLINES, RemoteDraft
from adapters.remote.peer import ExpectedModel, Peer
from adapters.remote.shard import RemoteShard
from effects.ports import RowsLost
from engine.draft import draft_name
from engine.options import Options
from engine.plan import Where
from engine.refusal import Refusal
from engine.secret import VARIABLE, shared_secret


@frozen(eq=False)
class Apart:
    """What is in other processes: of each shard that is, its daemon, and the draft's."""

    shards: tuple[Peer | None, ...]
    draft: Peer | None = None

    @property
    def all(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in (*self.shards, self.draft) if peer is not None)

    def drafting(self, wanted: bool) -> None:
        """A draft's process is of no use where it turns out that there will be none."""
        if self.draft is not None and not wanted:
            self.draft.close()

    def close(self) -> None:
        for peer in self.all:
            peer.close()


def connected(options: Options, folder: Path, checkpoint: Checkpoint) -> Apart:
    """All start before the first is waited for. Raises Refusal."""
    shards = tuple(peer_of(one, options, folder, checkpoint) for one in options.devices)
    drafted = draft_name(options.draft, options.model) != "none"
    where = options.draft_where if drafted else None
    apart = Apart(shards, None if where is None else peer_of(where, options, folder, checkpoint))
    if apart.draft is not None:
        apart.draft.deadlines = DRAFT_DEADLINES
    try:
        for peer in apart.all:
            peer.dial.begin()
        for peer in apart.all:
            peer.connect()
    except RowsLost as error:
        apart.close()
        raise Refusal(f"{asking_for(options)}: {error}") from error
    except OSError as error:
        apart.close()
        what = f"{options.target_shard_ipc_python or sys.executable}: {error.strerror or error}"
        raise Refusal(f"{asking_for(options)}: a process for a shard could not be started: {what}") from error
    except BaseException:
        apart.close()
        raise
    return apart


def asking_for(options: Options) -> str:
    """The options that name other processes."""
    asking = {"--target-devices": any(one.remote for one in options.devices)}
    asking["--draft-device"] = options.draft_where is not None
    return ", ".join(name for name, asks in asking.items() if asks)


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
        "process": process_of(remote),
        "bytes": part.memory(),
        "error": "" if remote is None else remote.error,
        "restarts": 0 if remote is None else remote.restarts,
    }


def shown_draft(draft: DraftModel) -> Mapping[str, Any]:
    """The same of a draft."""
    remote = draft.peer if isinstance(draft, RemoteDraft) else None
    return {
        "device": draft.place,
        "process": process_of(remote),
        "bytes": draft.memory(),
        "error": "" if remote is None else remote.error,
        "restarts": 0 if remote is None else remote.restarts,
    }


def process_of(peer: Peer | None) -> int:
    return os.getpid() if peer is None or peer.facts is None else peer.facts.pid


def hops(parts: Sequence[Shard], draft: DraftModel | None) -> Mapping[str, Mapping[str, float]]:
    """Of shards in other processes, by their layers, and of a draft: what forwards there have cost."""
    remote = [part for part in parts if isinstance(part, RemoteShard)]
    found = {f"{part.layers.start}-{part.layers.stop - 1}": part.peer.figures() for part in remote}
    return found | ({"draft": draft.peer.figures()} if isinstance(draft, RemoteDraft) else {})


def launched(where: Where, options: Options, folder: Path, secret: str) -> Launched:
    """The secret is in its environment, which other users cannot read, and not in its command line."""
    python = options.target_shard_ipc_python
    words = [str(python or sys.executable), "-P", "-m", "engine", "shard", str(folder.resolve())]
    words += ["--device", where.device, "--threads", str(options.threads)]
    words += ["--draft", draft_name(options.draft, options.model)]
    return Launched(where.name, words, {VARIABLE: secret, **({} if python else importable())})


def importable() -> Mapping[str, str]:
    """Where this interpreter has found us, for another one of the same."""
    root, before = str(Path(engine.__file__).parents[1]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, *([before] if before else [])])}
