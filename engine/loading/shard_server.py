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
from attrs import define

import engine
from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.layered_config import LayeredConfig
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.scorer import Scorer
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.formats.row_format import RowTypes, read_row_types
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.numerics.probe import probe_key
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.daemon.daemon import Daemon
from adapters.remote.daemon.reception import Reception
from adapters.remote.daemon.served_draft import ServedDraft
from adapters.remote.daemon.served_layers import ServedLayers
from adapters.remote.daemon.served_scorer import ServedScorer
from adapters.remote.protocol import shared_memory
from adapters.remote.protocol.channel import Channel, ConnectionBroken, ConnectionEnded, Shared
from adapters.remote.protocol.draft_messages import LoadDraft
from adapters.remote.protocol.handshake import HELLO_S, ProvenServer, refuse
from adapters.remote.protocol.lent_memory import Borrower
from adapters.remote.protocol.messages import Facts, LoadLayers, Offer, Prove
from adapters.remote.protocol.scorer_messages import LoadScorer
from adapters.sequence_layout import torch_dtype
from engine.loading.drafts.find_draft import open_draft
from engine.loading.drafts.load_draft import build_draft, build_own_kernels
from engine.loading.memory.device_survey import build_kernels, choose_device, free_memory, read_boot_id
from engine.loading.prove_numerics import build_probe_shape, choose_served_plan, load_or_run_probe
from engine.loading.warm_up import warm_up_own_draft
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.paths import choose_draft_name, find_user_folder
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle.shard")
WAITING = 128  # connections that wait to be accepted; they are accepted at once


@define(eq=False)
class ServedModel:
    """One checkpoint on one device, as a daemon serves it."""

    checkpoint: Checkpoint
    device: torch.device
    draft: str = "none"
    _proven: tuple[Checkpoint, torch.dtype, RowTypes, Kernels, Numerics] | None = None

    @classmethod
    def open(cls, model: str, device: str, draft: str = "none") -> ServedModel:
        """Open a model. draft: as for `--draft`. Raises UserError."""
        try:
            checkpoint = Checkpoint.open(find_checkpoint(model))
        except CheckpointError as error:
            raise UserError(str(error)) from error
        found = choose_device(device, "--device")
        where = torch.device("cuda", found.index or 0) if found.type == "cuda" else torch.device("cpu")
        return cls(checkpoint, where, choose_draft_name(draft, model))

    def facts(self) -> Facts:
        layers = self.checkpoint.config.num_layers
        return Facts(
            *digest_model(self.checkpoint),
            layers,
            str(self.device),
            read_boot_id(),
            os.getpid(),
            free_memory(self.device),
        )

    def prove(self, asked: Prove) -> Offer:
        """Return proven numerics.

        Those that the server has found are taken over if it is on the same machine, with the same libraries and
        threads. Otherwise they are proven here.
        """
        dtype = torch_dtype(asked.dtype)
        rows = read_row_types(asked.rows, dtype)
        checkpoint = self.checkpoint.with_quantisation(asked.bits) if asked.bits else self.checkpoint
        checkpoint = checkpoint.with_dtype(dtype)
        shape = build_probe_shape(checkpoint, self.device, (dtype, rows), asked.chunk, asked.capacity)
        with use_device(self.device):
            kernels = build_kernels(self.device, dtype)
            key = probe_key(checkpoint.family, checkpoint.config, kernels, shape)
            offered = [offer.outcome for offer in asked.offers if offer.key == key]
            if offered and asked.boot and asked.boot == read_boot_id():
                numerics = Numerics.from_json(offered[-1])
            else:
                numerics = load_or_run_probe(checkpoint, kernels, CalibrationCache(find_user_folder()), shape)
        self._proven = checkpoint, dtype, rows, kernels, numerics
        return Offer(key, numerics.to_json())

    def load(self, asked: LoadLayers) -> ServedLayers:
        if self._proven is None:
            raise ValueError("nothing is proven, so nothing is loaded")
        checkpoint, dtype, rows, kernels, numerics = self._proven
        with use_device(self.device):
            config = checkpoint.config
            shard = checkpoint.family.build(
                config,
                checkpoint,
                kernels.with_plan(choose_served_plan(numerics.plan, fast=asked.fast)),
                ShardPlacement(
                    device=self.device,
                    dtype=dtype,
                    rows=rows,
                    layers=range(*asked.layers),
                    slots=asked.slots,
                    capacity=asked.capacity,
                    buckets=asked.buckets,
                    aux_layers=asked.aux_layers,
                    state_checkpoints=asked.state_checkpoints,
                ),
            )
        given = config.find_crossing(asked.layers[0], dtype, rows)
        return ServedLayers(shard, config.num_layers, config.hidden_size, given.width)

    def load_draft(self, asked: LoadDraft) -> ServedDraft:
        dtype = torch_dtype(asked.dtype)
        kept = CalibrationCache(find_user_folder())
        checkpoint = self.checkpoint.with_quantisation(asked.bits) if asked.bits else self.checkpoint
        checkpoint = checkpoint.with_dtype(dtype)
        found = open_draft(self.draft, checkpoint)
        config = checkpoint.config
        if found is None:
            raise ValueError("there is no draft here: name one with --draft")
        placement = DraftPlacement(
            device=self.device, dtype=dtype, slots=asked.slots, capacity=asked.capacity, buckets=asked.buckets
        )
        kernels = build_own_kernels(found, config, placement, kept=kept, fast=asked.fast)
        with use_device(self.device):
            draft = build_draft(found, placement, kernels, checkpoint)
            warm_up_own_draft(draft, placement, asked.rows)
        return ServedDraft(draft, config.vocab_size, asked.nodes, *found.digests)

    def load_scorer(self, asked: LoadScorer) -> ServedScorer:
        if self._proven is None:
            raise ValueError("nothing is proven, so nothing is loaded")
        checkpoint, dtype, _, kernels, numerics = self._proven
        config = checkpoint.config
        if not isinstance(config, DenseConfig) or isinstance(config, LayeredConfig):
            raise ValueError(f"{checkpoint.family.model_type} models cannot score")  # noqa: TRY004 - of the server's
        own = kernels.with_plan(choose_served_plan(numerics.plan, fast=asked.fast))
        scorer = Scorer(config, checkpoint, own, self.device, dtype, numerics.buckets, asked.most)
        return ServedScorer(scorer)


def find_checkpoint(model: str) -> Path:
    """Return the folder or GGUF file of a model."""
    return demo.FOLDERS.get(model) or Path(model)


def digest_model(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return digests of weights and configuration, which both ends must agree on."""
    config = repr((checkpoint.family.model_type, checkpoint.config))
    return checkpoint.digest(), blake2b(config.encode(), digest_size=16).hexdigest()


def run_launched(model: str, device: str, draft: str, descriptors: tuple[int, ...], secret: bytes) -> int:
    """Serve the server that launched this process until the connection or the server ends."""
    channel = Channel(socket.socket(fileno=descriptors[0]))
    threading.Thread(target=exit_with_connection, args=(channel.socket,), name="shard-watch", daemon=True).start()
    join = build_joiner(descriptors[1:])
    return 0 if serve_connection(lambda: ServedModel.open(model, device, draft), channel, secret, join) else 1


def exit_with_connection(connection: socket.socket) -> None:
    """Exit when the server is gone, even while something is being computed."""
    watched = select.poll()
    watched.register(connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
    watched.poll()
    os._exit(0)


def build_joiner(memory: tuple[int, ...]) -> Callable[[tuple[int, int]], Shared | None]:
    """Return a function that maps the memory which the server shares with this process.

    memory: descriptors of what comes from the server, of what goes to it, and of host memory that it lends, if any. The
    function takes the bytes of the first two. It returns None where they cannot be mapped.
    """

    def join(sizes: tuple[int, int]) -> Shared | None:
        try:
            into, out = (
                shared_memory.join_memory(segment, size) for segment, size in zip(memory[:2], sizes, strict=True)
            )
            borrower = Borrower(memory[2]) if len(memory) > 2 else None
        except (OSError, ValueError) as error:
            log.warning("memory cannot be shared with the server, so data is sent over the connection: %s", error)
            return None
        return Shared(out, into, borrower=borrower)

    return join


def run_listening(model: str, device: str, draft: str, address: tuple[str, int], secret: bytes) -> int:
    """Serve one server after the other until the process is stopped. Each finds nothing of the one before.

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
            serve_connection(lambda: served_model, server.channel, secret, lambda _: None, server.proven)
    finally:
        reception.close()


def serve_connection(
    model: Callable[[], ServedModel],
    channel: Channel,
    secret: bytes,
    join: Callable[[tuple[int, int]], Shared | None],
    proven: ProvenServer | None = None,
) -> bool:
    """Serve one connection. Returns False if it broke. proven: a server whose hello was read already."""
    try:
        Daemon(channel, model(), secret, engine.__version__, join, proven).run()
    except ConnectionEnded:
        return True
    except ConnectionBroken as error:
        log.info("the connection to the server ended: %s", error)
        return False
    # The first server that connects gets the error.
    except UserError as error:
        with suppress(ConnectionBroken):
            head = channel.receive(HELLO_S).head
            refuse(channel, head.op, head.request, str(error), HELLO_S)
        raise
    return True
