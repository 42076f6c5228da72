"""The processes that have shards, the draft or the prompt scorer: they are launched or reached, and checked."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

import engine
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.shard import Shard
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.dial import AtAddress, Dial, Launched
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.client.remote_scorer import SCORER_DEADLINES
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.protocol.lent_memory import Lender
from adapters.remote.protocol.peer_expectation import DRAFT_DEADLINES, ExpectedModel
from effects.ports import RowsLost
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.load_scorer import LoadedScorer, find_scorer_folder
from engine.settings.options import Options, evolve_options
from engine.settings.output.live_figures import ModelMemory, ShardMemory
from engine.settings.paths import choose_draft_name
from engine.settings.placement import DeviceLocation
from engine.settings.shard_secret import VARIABLE, find_shared_secret
from engine.settings.user_error import UserError


@frozen(eq=False)
class RemotePeers:
    """The other processes of a load. shards: of each shard, its process or None. lender: lends memory to processes that
    were launched here.
    """

    shards: tuple[Peer | None, ...]
    draft: Peer | None = None
    scorer: Peer | None = None
    lender: Lender | None = None

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in (*self.shards, self.draft, self.scorer) if peer is not None)

    def close_unused_draft(self, found: FoundDraft | None) -> FoundDraft | None:
        """Return the draft unchanged. If there is none after all, its process is closed."""
        if self.draft is not None and found is None:
            self.draft.close()
        return found

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def connect_peers(options: Options, folder: Path, checkpoint: Checkpoint) -> RemotePeers:
    """Launch or reach all processes. All start before the first one is waited for. Raises UserError."""
    drafted = choose_draft_name(options.speculation.draft, options.model.model) != "none"
    where = options.speculation.remote_location if drafted else None
    lender = (
        Lender.open()
        if any(location is not None and location.is_launched for location in (*options.placement.locations, where))
        else None
    )
    shards = tuple(
        build_peer(location, options, folder, checkpoint, lender) for location in options.placement.locations
    )
    draft = None if where is None else build_peer(where, options, folder, checkpoint, lender)
    apart = RemotePeers(shards, draft, build_scorer_peer(options), lender)
    if apart.draft is not None:
        apart.draft.deadlines = DRAFT_DEADLINES
    try:
        for peer in apart.peers:
            peer.dial.begin()
        for peer in apart.peers:
            peer.connect()
    except RowsLost as error:
        apart.close()
        raise UserError(f"{list_remote_flags(options)}: {error}") from error
    except OSError as error:
        apart.close()
        what = f"{options.placement.target_shard_ipc_python or sys.executable}: {error.strerror or error}"
        raise UserError(f"{list_remote_flags(options)}: a process for a shard could not be started: {what}") from error
    except BaseException:
        apart.close()
        raise
    return apart


def build_scorer_peer(options: Options) -> Peer | None:
    """Return the process that has the prompt scorer as its model, or None. Raises UserError."""
    if (where := options.compression.remote_location) is None:
        return None
    folder = find_scorer_folder(options)
    try:
        peer = build_peer(where, evolve_options(options, draft="none"), folder, Checkpoint.open(folder))
    except CheckpointError as error:
        raise UserError(f"--prefill-drafter {error}") from error
    if peer is not None:
        peer.deadlines = SCORER_DEADLINES
    return peer


def list_remote_flags(options: Options) -> str:
    """Return the flags that name other processes."""
    asking = {"--target-devices": any(location.is_remote for location in options.placement.locations)}
    asking["--draft-device"] = options.speculation.remote_location is not None
    asking["--prefill-drafter-device"] = options.compression.remote_location is not None
    return ", ".join(name for name, asks in asking.items() if asks)


def build_peer(
    where: DeviceLocation, options: Options, folder: Path, checkpoint: Checkpoint, lender: Lender | None = None
) -> Peer | None:
    """Return the process at a location, not connected yet. None if the location is in this process."""
    if not where.is_remote:
        return None
    from engine.loading.shard_server import digest_model  # noqa: PLC0415 - only where there is one

    secret = secrets.token_hex(32) if where.is_launched else find_shared_secret(options.placement.shard_secret_file)
    if where.address:
        dial: Dial = AtAddress(where.name, where.address)
    else:
        dial = build_launch(where, options, folder, secret, lender)
    return Peer(dial, secret.encode(), engine.__version__, ExpectedModel(*digest_model(checkpoint)))


def find_peer(part: Shard | DraftModel) -> Peer | None:
    """Return the other process that has this shard or draft; None if it is in this process."""
    return part.peer if isinstance(part, RemoteShard | RemoteDraft) else None


def name_device(part: Shard) -> str:
    """Return where the layers of a shard are computed, as the user named it."""
    peer = find_peer(part)
    return str(part.spec.device) if peer is None else peer.dial.name


def describe_placement(parts: Sequence[Shard]) -> str:
    """Return which layers are where, in one word."""
    return ",".join(f"{part.spec.layers.start}-{part.spec.layers.stop - 1}@{name_device(part)}" for part in parts)


def describe_shard(part: Shard) -> ShardMemory:
    """Return what /props shows of a shard. While its process is gone, that includes the reason (`error`)."""
    remote = find_peer(part)
    return ShardMemory(
        layers=(part.spec.layers.start, part.spec.layers.stop),
        device=name_device(part),
        remote=remote is not None,
        cpu_experts=(part.spec.cpu_experts.start, part.spec.cpu_experts.stop),
        process=find_process(remote),
        bytes=part.memory(),
        error="" if remote is None else remote.error,
        restarts=0 if remote is None else remote.restarts,
    )


def describe_draft(draft: DraftModel) -> ModelMemory:
    """Return what /props shows of a draft."""
    return describe_model(draft.location, draft.memory(), find_peer(draft))


def describe_scorer(scorer: LoadedScorer) -> ModelMemory:
    """Return what /props shows of a prompt scorer."""
    return describe_model(scorer.found.location, scorer.memory(), scorer.found.peer)


def describe_model(location: str, held: Mapping[str, int], remote: Peer | None) -> ModelMemory:
    """Return what /props shows of a model that is not the target."""
    return ModelMemory(
        device=location,
        process=find_process(remote),
        bytes=held,
        error="" if remote is None else remote.error,
        restarts=0 if remote is None else remote.restarts,
    )


def find_process(peer: Peer | None) -> int:
    return os.getpid() if peer is None or peer.facts is None else peer.facts.pid


def collect_remote_figures(
    parts: Sequence[Shard], draft: DraftModel | None, scorer: LoadedScorer | None
) -> Mapping[str, Mapping[str, float]]:
    """Return what forwards in other processes have cost, by the layers of a shard, or `draft`, or `drafter`."""
    remote = {f"{part.spec.layers.start}-{part.spec.layers.stop - 1}": find_peer(part) for part in parts}
    remote |= {} if draft is None else {"draft": find_peer(draft)}
    remote |= {} if scorer is None else {"drafter": scorer.found.peer}
    return {name: peer.figures() for name, peer in remote.items() if peer is not None}


def build_launch(where: DeviceLocation, options: Options, folder: Path, secret: str, lender: Lender | None) -> Launched:
    """Return how to launch a process. The secret is in its environment, which other users cannot read, not in its
    arguments.
    """
    python = options.placement.target_shard_ipc_python
    words = [str(python or sys.executable), "-P", "-m", "engine", "shard", str(folder.resolve())]
    words += ["--device", where.device, "--threads", str(options.runtime.threads)]
    words += ["--draft", choose_draft_name(options.speculation.draft, options.model.model)]
    return Launched(where.name, words, {VARIABLE: secret, **({} if python else build_import_path())}, lender)


def build_import_path() -> Mapping[str, str]:
    """Return the environment with which another interpreter of the same kind finds this package."""
    root = str(Path(engine.__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([root, *([before] if before else [])])}
