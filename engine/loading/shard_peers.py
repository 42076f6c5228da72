"""The daemons that a target's shards, its draft and its drafter are in: launched or reached, and known to be right."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

import engine
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.shard import Shard
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.dial import AtAddress, Dial, Launched
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.client.remote_scorer import DRAFTER_DEADLINES
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.protocol.lent_memory import Lender
from adapters.remote.protocol.peer_expectation import DRAFT_DEADLINES, ExpectedModel
from effects.ports import RowsLost
from engine.loading.load_draft import FoundDraft
from engine.loading.load_scorer import Drafter, drafter_folder
from engine.settings.options import Options
from engine.settings.paths import draft_name
from engine.settings.placement import Where
from engine.settings.shard_secret import VARIABLE, shared_secret
from engine.settings.user_error import UserError


@frozen(eq=False)
class Apart:
    """What is in other processes: of each shard that is, its daemon, and the draft's and the drafter's. lender: of what
    those see that were launched here.
    """

    shards: tuple[Peer | None, ...]
    draft: Peer | None = None
    drafter: Peer | None = None
    lender: Lender | None = None

    @property
    def all(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in (*self.shards, self.draft, self.drafter) if peer is not None)

    def drafting(self, found: FoundDraft | None) -> FoundDraft | None:
        """The same. A draft's process is of no use where it turns out that there will be none."""
        if self.draft is not None and found is None:
            self.draft.close()
        return found

    def close(self) -> None:
        for peer in self.all:
            peer.close()


def connected(options: Options, folder: Path, checkpoint: Checkpoint) -> Apart:
    """All start before the first is waited for. Raises Refusal."""
    drafted = draft_name(options.draft, options.model) != "none"
    where = options.draft_where if drafted else None
    lender = Lender.opened() if any(one is not None and one.launched for one in (*options.devices, where)) else None
    shards = tuple(peer_of(one, options, folder, checkpoint, lender) for one in options.devices)
    draft = None if where is None else peer_of(where, options, folder, checkpoint, lender)
    apart = Apart(shards, draft, drafter_apart(options), lender)
    if apart.draft is not None:
        apart.draft.deadlines = DRAFT_DEADLINES
    try:
        for peer in apart.all:
            peer.dial.begin()
        for peer in apart.all:
            peer.connect()
    except RowsLost as error:
        apart.close()
        raise UserError(f"{asking_for(options)}: {error}") from error
    except OSError as error:
        apart.close()
        what = f"{options.target_shard_ipc_python or sys.executable}: {error.strerror or error}"
        raise UserError(f"{asking_for(options)}: a process for a shard could not be started: {what}") from error
    except BaseException:
        apart.close()
        raise
    return apart


def drafter_apart(options: Options) -> Peer | None:
    """Its process has the drafter for its model. Raises Refusal."""
    if (where := options.drafter_where) is None:
        return None
    folder = drafter_folder(options)
    try:
        peer = peer_of(where, evolve(options, draft="none"), folder, Checkpoint.open(folder))
    except CheckpointError as error:
        raise UserError(f"--prefill-drafter {error}") from error
    if peer is not None:
        peer.deadlines = DRAFTER_DEADLINES
    return peer


def asking_for(options: Options) -> str:
    """The options that name other processes."""
    asking = {"--target-devices": any(one.remote for one in options.devices)}
    asking["--draft-device"] = options.draft_where is not None
    asking["--prefill-drafter-device"] = options.drafter_where is not None
    return ", ".join(name for name, asks in asking.items() if asks)


def peer_of(
    where: Where, options: Options, folder: Path, checkpoint: Checkpoint, lender: Lender | None = None
) -> Peer | None:
    if not where.remote:
        return None
    from engine.loading.shard_server import described  # noqa: PLC0415 - only where there is one

    secret = secrets.token_hex(32) if where.launched else shared_secret(options.shard_secret_file)
    if where.address:
        dial: Dial = AtAddress(where.name, where.address)
    else:
        dial = launched(where, options, folder, secret, lender)
    return Peer(dial, secret.encode(), engine.__version__, ExpectedModel(*described(checkpoint)))


def place_of(part: Shard) -> str:
    """Where its layers are computed, as the user says it."""
    return part.peer.dial.name if isinstance(part, RemoteShard) else str(part.device)


def placement(parts: Sequence[Shard]) -> str:
    """Which layers are where, in a word."""
    return ",".join(f"{part.layers.start}-{part.layers.stop - 1}@{place_of(part)}" for part in parts)


def shown(part: Shard) -> Mapping[str, Any]:
    """For /props. error: why it is gone, while it is."""
    remote = part.peer if isinstance(part, RemoteShard) else None
    return {
        "layers": [part.layers.start, part.layers.stop],
        "device": place_of(part),
        "remote": remote is not None,
        "process": process_of(remote),
        "bytes": part.memory(),
        "error": "" if remote is None else remote.error,
        "restarts": 0 if remote is None else remote.restarts,
    }


def shown_draft(draft: DraftModel) -> Mapping[str, Any]:
    """The same of a draft."""
    return shown_beside(draft.place, draft.memory(), draft.peer if isinstance(draft, RemoteDraft) else None)


def shown_drafter(drafter: Drafter) -> Mapping[str, Any]:
    """And of a drafter."""
    return shown_beside(drafter.found.place, drafter.memory(), drafter.found.peer)


def shown_beside(place: str, held: Mapping[str, int], remote: Peer | None) -> Mapping[str, Any]:
    """Of a model that is not the target."""
    return {
        "device": place,
        "process": process_of(remote),
        "bytes": held,
        "error": "" if remote is None else remote.error,
        "restarts": 0 if remote is None else remote.restarts,
    }


def process_of(peer: Peer | None) -> int:
    return os.getpid() if peer is None or peer.facts is None else peer.facts.pid


def hops(
    parts: Sequence[Shard], draft: DraftModel | None, drafter: Drafter | None
) -> Mapping[str, Mapping[str, float]]:
    """Of shards in other processes, by their layers, of a draft and of a drafter: what forwards there have cost."""
    remote = {
        f"{part.layers.start}-{part.layers.stop - 1}": part.peer for part in parts if isinstance(part, RemoteShard)
    }
    remote |= {"draft": draft.peer} if isinstance(draft, RemoteDraft) else {}
    remote |= {} if drafter is None or drafter.found.peer is None else {"drafter": drafter.found.peer}
    return {name: peer.figures() for name, peer in remote.items()}


def launched(where: Where, options: Options, folder: Path, secret: str, lender: Lender | None) -> Launched:
    """The secret is in its environment, which other users cannot read, and not in its command line."""
    python = options.target_shard_ipc_python
    words = [str(python or sys.executable), "-P", "-m", "engine", "shard", str(folder.resolve())]
    words += ["--device", where.device, "--threads", str(options.threads)]
    words += ["--draft", draft_name(options.draft, options.model)]
    return Launched(where.name, words, {VARIABLE: secret, **({} if python else importable())}, lender)


def importable() -> Mapping[str, str]:
    """Where this interpreter has found us, for another one of the same."""
    root, before = str(Path(engine.__file__).parents[1]), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, *([before] if before else [])])}
