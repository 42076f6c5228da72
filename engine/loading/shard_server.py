"""`rekindle shard`: layers of a model for a server in another process, which launched this one or connects to it."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
from attrs import define, frozen

import engine
from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.dense_config import DenseConfig
from adapters.models.decoder.pipelined_chunks import current
from adapters.models.decoder.scorer import Scorer
from adapters.models.kernels.interface import Kernels
from adapters.models.numerics.probe import probe_key
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.daemon.daemon import Daemon
from adapters.remote.daemon.reception import Reception
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.daemon.served_scorer import ServedDrafter
from adapters.remote.protocol import shared_memory
from adapters.remote.protocol.channel import Channel, ConnectionBroken, ConnectionEnded, Shared
from adapters.remote.protocol.draft_messages import LoadDraft
from adapters.remote.protocol.handshake import HELLO_S, ProvenServer, refuse
from adapters.remote.protocol.lent_memory import Borrower
from adapters.remote.protocol.messages import Facts, LoadLayers, Offer, Prove
from adapters.remote.protocol.scorer_messages import LoadDrafter
from adapters.sequence_layout import torch_dtype
from engine.loading.device_survey import (
    boot_id,
    build_kernels,
    choose_device,
    free_memory,
    plan_served,
    probed,
    probing,
)
from engine.loading.load_draft import built, kernels_apart, named_draft
from engine.loading.warm_up import warm_up_apart
from engine.settings.calibration_cache import Kept
from engine.settings.paths import draft_name, user_folder
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle.shard")
WAITING = 128  # connections that nobody has taken yet: a moment's, as hellos wait for nothing


@define(eq=False)
class ServedModel:
    """One checkpoint on one device, as a daemon serves it."""

    checkpoint: Checkpoint
    device: torch.device
    draft: str = "none"
    _proven: tuple[Checkpoint, torch.dtype, torch.dtype, Kernels, Numerics] | None = None

    @classmethod
    def open(cls, model: str, device: str, draft: str = "none") -> ServedModel:
        """draft: as `--draft` has it. Raises Refusal."""
        try:
            checkpoint = Checkpoint.open(folder_of(model))
        except CheckpointError as error:
            raise UserError(str(error)) from error
        found = choose_device(device, "--device")
        where = torch.device("cuda", found.index or 0) if found.type == "cuda" else torch.device("cpu")
        return cls(checkpoint, where, draft_name(draft, model))

    def facts(self) -> Facts:
        layers = self.checkpoint.config.num_layers
        return Facts(
            *described(self.checkpoint), layers, str(self.device), boot_id(), os.getpid(), free_memory(self.device)
        )

    def prove(self, asked: Prove) -> Offer:
        """What the server has found, if it is on the same machine, with the same libraries and threads; or else what
        holds here.
        """
        dtype, rows = torch_dtype(asked.dtype), torch_dtype(asked.rows)
        checkpoint = self.checkpoint.quantised(asked.bits) if asked.bits else self.checkpoint
        checkpoint = checkpoint.rounded(dtype)
        how = probing(checkpoint, self.device, (dtype, rows), asked.chunk, asked.capacity)
        with current(self.device):
            kernels = build_kernels(self.device, dtype)
            key = probe_key(checkpoint.family, checkpoint.config, kernels, **how)
            offered = [one.outcome for one in asked.offers if one.key == key]
            if offered and asked.boot and asked.boot == boot_id():
                numerics = Numerics.from_json(offered[-1])
            else:
                numerics = probed(checkpoint, kernels, Kept(user_folder()), **how)
        self._proven = checkpoint, dtype, rows, kernels, numerics
        return Offer(key, numerics.to_json())

    def load(self, asked: LoadLayers) -> ServedLayers:
        if self._proven is None:
            raise ValueError("nothing is proven, so nothing is loaded")
        checkpoint, dtype, rows, kernels, numerics = self._proven
        with current(self.device):
            config = checkpoint.config
            shard = checkpoint.family.build(
                config,
                checkpoint,
                kernels.with_plan(plan_served(numerics, fast=asked.fast)),
                device=self.device,
                dtype=dtype,
                rows=rows,
                layers=range(*asked.layers),
                slots=asked.slots,
                capacity=asked.capacity,
                buckets=asked.buckets,
                aux_layers=asked.aux_layers,
                state_places=asked.state_places,
            )
        return ServedLayers(shard, config.num_layers, config.hidden_size)

    def load_draft(self, asked: LoadDraft) -> ServedDraft:
        dtype, kept = torch_dtype(asked.dtype), Kept(user_folder())
        checkpoint = self.checkpoint.quantised(asked.bits) if asked.bits else self.checkpoint
        checkpoint = checkpoint.rounded(dtype)
        found, config = named_draft(self.draft, checkpoint), checkpoint.config
        if found is None:
            raise ValueError("there is no draft here: name one with --draft")
        room = DraftRoom(dtype, asked.slots, asked.capacity, asked.buckets)
        kernels = kernels_apart(found, config, room, self.device, kept=kept, fast=asked.fast)
        with current(self.device):
            draft = built(found, room, kernels, self.device, checkpoint)
            warm_up_apart(draft, room, asked.rows)
        return ServedDraft(draft, config.vocab_size, asked.nodes, *found.digests)

    def load_drafter(self, asked: LoadDrafter) -> ServedDrafter:
        if self._proven is None:
            raise ValueError("nothing is proven, so nothing is loaded")
        checkpoint, dtype, _, kernels, numerics = self._proven
        config = checkpoint.config
        if not isinstance(config, DenseConfig):
            raise ValueError(f"{checkpoint.family.model_type} models cannot score")  # noqa: TRY004 - of the server's
        own = kernels.with_plan(plan_served(numerics, fast=asked.fast))
        scorer = Scorer(config, checkpoint, own, self.device, dtype, numerics.buckets, asked.most)
        return ServedDrafter(scorer)


@frozen
class DraftRoom:
    """As its server has asked for it."""

    dtype: torch.dtype
    slots: int
    capacity: int
    buckets: tuple[int, ...]


def folder_of(model: str) -> Path:
    return demo.FOLDERS.get(model) or Path(model)


def described(checkpoint: Checkpoint) -> tuple[str, str]:
    """Weights and configuration, as both ends must have them."""
    config = repr((checkpoint.family.model_type, checkpoint.config))
    return checkpoint.digest(), blake2b(config.encode(), digest_size=16).hexdigest()


def run_launched(model: str, device: str, draft: str, descriptors: tuple[int, ...], secret: bytes) -> int:
    """For the server that launched it, until that ends the connection, or itself."""
    channel = Channel(socket.socket(fileno=descriptors[0]))
    threading.Thread(target=leave_with, args=(channel.socket,), name="shard-watch", daemon=True).start()
    join = joining(descriptors[1:])
    return 0 if served(lambda: ServedModel.open(model, device, draft), channel, secret, join) else 1


def leave_with(connection: socket.socket) -> None:
    """The server is gone: whatever is being computed is of no use to anybody."""
    watched = select.poll()
    watched.register(connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    watched.poll()
    os._exit(0)


def joining(memory: tuple[int, ...]) -> Callable[[tuple[int, int]], Shared | None]:
    """The memory that the server has made: from it, and to it, and what it lends."""

    def join(sizes: tuple[int, int]) -> Shared | None:
        try:
            into, out = (shared_memory.joined(one, size) for one, size in zip(memory[:2], sizes, strict=True))
            borrower = Borrower(memory[2]) if len(memory) > 2 else None
        except (OSError, ValueError) as error:
            log.warning("no memory is shared with the server: %s", error)
            return None
        return Shared(out, into, borrower=borrower)

    return join


def run_listening(model: str, device: str, draft: str, address: tuple[str, int], secret: bytes) -> int:
    """For one server after the other, until somebody stops it. What one has left the next one does not find.

    Layers are computed on this thread, which has the number of threads that was asked for.
    """
    served_model = ServedModel.open(model, device, draft)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listening = socket.create_server(address, family=family, backlog=WAITING)
    except OSError as error:
        raise UserError(f"--listen tcp://{address[0]}:{address[1]}: {error.strerror or error}") from error
    host, port = listening.getsockname()[:2]
    reception = Reception(listening, secret)
    reception.open()
    print(f"ready  tcp://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    try:
        while True:
            server = reception.next()
            served(lambda: served_model, server.channel, secret, lambda _: None, server.proven)
    finally:
        reception.close()


def served(
    model: Callable[[], ServedModel],
    channel: Channel,
    secret: bytes,
    join: Callable[[tuple[int, int]], Shared | None],
    proven: ProvenServer | None = None,
) -> bool:
    """One connection. False where it did not end well. proven: its hello was heard already."""
    try:
        Daemon(channel, model(), secret, engine.__version__, join, proven).run()
    except ConnectionEnded:
        return True
    except ConnectionBroken as error:
        log.info("the connection to the server ended: %s", error)
        return False
    except UserError as error:  # whoever says hello first is told
        with suppress(ConnectionBroken):
            head = channel.receive(HELLO_S).head
            refuse(channel, head.op, head.request, str(error), HELLO_S)
        raise
    return True
