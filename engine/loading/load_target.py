"""From options to a loaded target: the only place that constructs the model side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch
from attrs import asdict, define, evolve
from attrs.filters import exclude

from adapters import demo
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.buckets import row_counts
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.host_experts import HostExperts
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.kernels.row_format import row_dtype
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.client.remote_shard import RemoteShard
from adapters.sequence_layout import torch_dtype
from adapters.transfer.transfer import Transfer
from adapters.watched_thread import Watched
from effects.ports import RowsLost
from effects.scope import Scope
from engine.loading.attach_draft import add_draft, beside_last, sent_away
from engine.loading.build_executor import build_executor
from engine.loading.decide_settings import decide
from engine.loading.device_survey import planned
from engine.loading.expert_placement import counted, first_places
from engine.loading.load_draft import BATCH_ROWS, find_draft, provable
from engine.loading.load_scorer import Drafter, add_drafter, find_drafter, pflash
from engine.loading.load_shards import shards, uploading
from engine.loading.memory_estimate import chosen, host_experts, should_offload_embedding
from engine.loading.open_store import keeping, layout, stored, transfer_memory
from engine.loading.plan_load import settled
from engine.loading.shard_peers import (
    Apart,
    asking_for,
    connected,
    place_of,
    shown,
    shown_draft,
    shown_drafter,
)
from engine.loading.warm_up import picking_beside, warm_up
from engine.settings import start_progress
from engine.settings.calibration_cache import Kept
from engine.settings.model_catalog import served_name
from engine.settings.options import Options
from engine.settings.paths import model_folder, user_folder
from engine.settings.user_error import UserError
from states.settings import Settings

log = logging.getLogger("rekindle")


@define
class Target:
    """A model that is ready to be asked, and what the engine and the edge need to know of it."""

    folder: Path
    checkpoint: Checkpoint
    shard: Pipeline
    lane: DeviceLane
    executor: DeviceExecutor
    numerics: Numerics
    settings: Settings
    identity: str
    model_id: str
    mode: str  # exact or fast
    freezes: bool  # messages that have aged, where a drafter is
    scope: Scope  # of requests that do not say
    kept: Kept
    draft: DraftModel | None = None
    drafter: Drafter | None = None
    offloaded: HostExperts | None = None
    pflash: Mapping[str, Any] = {}
    transfer: Transfer | None = None  # None: neither host memory nor disk keep anything

    @property
    def numerics_shown(self) -> Mapping[str, Any]:
        return {"mode": self.mode, **self.numerics.shown()}

    @property
    def weights(self) -> int:
        """Bytes, but for experts that are in host memory."""
        held = self.shard.memory()
        return held["weights"] + held["host"]

    @property
    def model_info(self) -> Mapping[str, Any]:
        config = self.checkpoint.config
        return {
            "n_ctx_train": config.max_positions,
            "dtype": str(self.shard.dtype).removeprefix("torch."),
            "kv_dtype": str(torch_dtype(self.shard.row_spec.dtype)).removeprefix("torch."),
            "size": self.weights,
            "packed": list(self.checkpoint.forms),
            "bits_per_weight": round(self.checkpoint.bits, 2),
            "bits_in_memory": round(self.checkpoint.bits_of(self.weights), 2),
            "quantize_error": self.checkpoint.error,
        }

    @property
    def facts(self) -> Mapping[str, Any]:
        devices = ", ".join(dict.fromkeys(map(place_of, self.shard.parts)))
        return {
            "model": {"id": self.model_id, "identity": self.identity, "device": devices, **self.model_info},
            "pflash": self.pflash,
            "settings": asdict(self.settings, filter=exclude("rates")),  # those change: `rates_ns`
        }

    @property
    def threads(self) -> tuple[Watched, ...]:
        """Whose troubles /health tells."""
        store = () if self.transfer is None else self.transfer.store.threads
        return (*self.executor.threads, *store, *(() if self.drafter is None else self.drafter.threads))

    @property
    def has_disk(self) -> bool:
        return self.transfer is not None and self.transfer.store.disk is not None

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Of its shards in other processes."""
        return tuple(part.peer for part in self.shard.parts if isinstance(part, RemoteShard))

    @property
    def outages(self) -> Mapping[str, str]:
        """Of shards that are gone, by name: why. Nothing is answered without them."""
        return {f"shard {peer.dial.name}": peer.gone for peer in self.peers if peer.gone}

    def live(self) -> Mapping[str, Any]:
        return {**self._live(), "outages": self.outages}

    def _live(self) -> Mapping[str, Any]:
        damaged: Mapping[str, int] = self.kept.damaged
        if self.transfer is None:
            return {"memory": self.memory(0), "damaged": damaged, "full_cache": {"disk_policy": "off"}}
        cache = self.transfer.store.figures()
        policy = str(self.scope) if self.has_disk else "off"
        return {
            "memory": self.memory(cache["host"]["bytes"]),
            "damaged": {**damaged, **self.transfer.store.damaged},
            "full_cache": {**cache, "disk_policy": policy},
        }

    def memory(self, blocks: int) -> Mapping[str, Any]:
        """The ledger, in bytes: where each model's weights are, the slots' rows and buffers, the cache's blocks."""
        target = self.shard.memory()
        host = target["host"] + (0 if self.offloaded is None else self.offloaded.host_bytes)
        draft = {} if self.draft is None else self.draft.memory()
        parts = [shown(part) for part in self.shard.parts]
        others = {"draft": draft, **({} if self.drafter is None else {"drafter": self.drafter.memory()})}
        models = {name: {"device": one["weights"], "host": one["host"]} for name, one in others.items() if one}
        return {
            "models": {"target": {"device": target["weights"], "host": host}, **models},
            "experts": None if self.offloaded is None else self.offloaded.shown(),
            "shards": parts,
            "draft": None if self.draft is None else shown_draft(self.draft),
            "drafter": None if self.drafter is None else shown_drafter(self.drafter),
            "slots": {"target": target["kv"], "draft": draft.get("kv", 0)},
            "buffers": {"target": target["buffers"], **{name: one.get("buffers", 0) for name, one in others.items()}},
            "blocks": {"host": blocks},
            "pool": {"host": 0 if self.transfer is None else self.transfer.store.memory.held},
        }

    @property
    def numerics_line(self) -> str:
        buckets = self.numerics.buckets
        return f"numerics={self.mode} ({self.numerics.mode}, buckets {buckets[0]}..{buckets[-1]})"

    async def close(self) -> None:
        """What is copied beside the lane first, then the lane, then the files that it handed over."""
        if self.transfer is not None:
            await anyio.to_thread.run_sync(self.transfer.saver.close)
        await anyio.to_thread.run_sync(self.executor.close)
        if isinstance(self.draft, RemoteDraft):  # whose process would wait for more
            await anyio.to_thread.run_sync(self.draft.close)
        if self.drafter is not None:
            await anyio.to_thread.run_sync(self.drafter.close)
        if self.transfer is not None:
            await anyio.to_thread.run_sync(self.transfer.close)


class Mismatched(Exception):
    """The model is there, and its identity, the argument, is not the one that is wanted."""


def load_on_lane(options: Options, lane: DeviceLane, step: start_progress.StepHeard, only: str | None = None) -> Target:
    if options.threads and any(device.type == "cpu" for device in lane.devices):
        torch.set_num_threads(options.threads)
    folder = model_folder(options)
    checkpoint = Checkpoint.open(folder)
    apart = connected(options, folder, checkpoint)
    try:
        target = load_over(apart, checkpoint, options, lane, step=step, only=only)
    except RowsLost as error:
        apart.close()
        raise UserError(f"{asking_for(options)}: {error}") from error
    except BaseException:
        apart.close()
        raise
    for peer in apart.shards:
        if peer is not None:
            peer.lost_to(target.executor.lose_all_slots)
    return target


def load_over(
    apart: Apart,
    checkpoint: Checkpoint,
    options: Options,
    lane: DeviceLane,
    *,
    step: start_progress.StepHeard,
    only: str | None,
) -> Target:
    """apart: of what is in other processes, the daemons."""
    dtype, fast = resolve_dtype(options.dtype, checkpoint), options.numerics == "fast"
    checkpoint = (checkpoint.quantised(options.bits) if options.bits else checkpoint).rounded(dtype)
    plan, opened = planned(options, checkpoint.config, apart.shards), find_draft(options, checkpoint)
    fit = chosen(options, checkpoint.config, dtype, plan, opened, peer=apart.draft, layouts=checkpoint.layouts)
    kept = Kept(user_folder(), proving=lambda: step(start_progress.PROBE))
    memory = transfer_memory(options, [one.device for one in plan], apart.lender)
    heard = checkpoint.followed(start_progress.parts(step, start_progress.WEIGHTS, len(checkpoint.tensors)))
    away = should_offload_embedding(checkpoint.config, dtype, plan, checkpoint.layouts)
    with picking_beside(plan, checkpoint.config.vocab_size), uploading(heard, plan, memory, dtype) as sources:
        how: dict[str, Any] = {"fit": fit, "peer": apart.draft, "kept": kept, "step": step}
        fit, numerics, kernels, named = settled(options, checkpoint, dtype, plan, opened, **how)
        if only not in {None, named}:
            raise Mismatched(named)
        found = apart.drafting(provable(opened, numerics))
        scores = find_drafter(options, checkpoint.folder, plan[-1].device, fit.context, peer=apart.drafter)
        step(start_progress.WEIGHTS)
        offloaded = host_experts(options, checkpoint, dtype, plan)
        room: dict[str, Any] = {"slots": fit.slots, "capacity": fit.context, "pages": fit.pages, "fast": fast}
        room |= {"rows": row_dtype(options.kv_dtype, dtype), "offloaded": offloaded, "offload_embedding": away}
        room |= {"state_places": options.state_checkpoints, "buckets": row_counts(numerics.buckets, fast=fast)}
        aux = () if found is None else found.shape.aux_layers
        shard = shards(heard, dtype, plan, kernels, sources, aux_layers=aux, **room)
    first_places(offloaded)
    parts = ExecutorParts(shard, numerics.buckets, lane, fast=fast, experts=offloaded)
    placing: dict[str, Any] = {"kernels": beside_last(kernels), "numerics": numerics, "kept": kept, "peer": apart.draft}
    drafting = add_draft(found, options, checkpoint, shard, events=parts.events, step=step, **placing)
    draft = None if drafting is None else drafting.draft
    parts = evolve(parts, proposer=drafting)
    step(start_progress.WARM_UP)
    warm_up(shard, draft, BATCH_ROWS)
    step(start_progress.MEASURE)
    how = {"plan": plan, "numerics": numerics, "named": named, "kept": kept, "fit": fit}
    settings = counted(decide(options, parts, shard, draft, scores, **how), offloaded)
    drafter, settings = add_drafter(scores, options, lane, settings=settings, kept=kept)
    step(start_progress.CACHE)
    kind = layout(shard, draft, named, numerics.block_size)
    moving = keeping(options, kind, shard, parts.slots, lane, drafting=drafting, memory=memory)
    settings = settings if moving is None else stored(settings, moving, shard, chunk=numerics.chunk, kept=kept)
    executor = build_executor(parts, settings, drafting=drafting, drafter=drafter, transfer=moving)
    sent_away(drafting, settings)
    return Target(
        folder=model_folder(options),
        checkpoint=checkpoint,
        shard=shard,
        lane=lane,
        executor=executor,
        numerics=numerics,
        settings=settings,
        identity=named,
        model_id=options.model if options.model in demo.FOLDERS else served_name(model_folder(options)),
        mode=options.numerics,
        freezes=options.disk_prefix_cache_compress,
        scope=options.scope,
        kept=kept,
        draft=draft,
        drafter=drafter,
        offloaded=offloaded,
        pflash=pflash(options, settings, drafter),
        transfer=moving,
    )
