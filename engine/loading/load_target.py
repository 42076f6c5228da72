"""Loads a model from options. Everything that constructs a part of a model is called from here.

Theory of operation. A start must not read gigabytes before it knows that it can serve, and a restart must not serve
other bits than before. So the load has stages, and each gets typed results of those before:
* Connect the processes that have parts of the model (`RemotePeers`), and plan where the layers go.
* Estimate slots and context that fit (`Fit`), and prove their numerics (`ProvenPlan`). Now the identity is known.
* Build the shards and read their weights, then the draft.
* Warm up, and measure rates for the scheduler (`Settings`).
* Add the prompt scorer and the store, and build the executor, which is complete from then on.

Begin with `load_on_lane`, which runs on the lane, because loading already launches device work. What it returns owns
everything that was opened, and `LoadedModel.close` closes it in the order that the threads need. If a stage raises,
the processes of remote parts are closed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import anyio.to_thread
import torch
from attrs import define

from adapters import demo
from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.buckets import row_counts
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from adapters.remote.client.peer import Peer
from adapters.transfer.transfer import Transfer
from adapters.watched_thread import WatchedThread
from effects.model_details import ModelDetails
from effects.ports import RowsLost
from effects.scope import Scope
from engine.loading.build_executor import build_executor
from engine.loading.choose_settings import choose_settings
from engine.loading.drafts.attach_draft import (
    add_proposers,
    get_last_kernels,
    offload_unused_draft,
    with_kept_answers,
)
from engine.loading.drafts.find_draft import FoundDraft, drop_unverifiable_draft, find_draft
from engine.loading.drafts.load_draft import BATCH_ROWS, DraftNeighbours
from engine.loading.identity import check_identity
from engine.loading.load_scorer import LoadedScorer, add_scorer, describe_compression, find_scorer
from engine.loading.load_shards import build_shards, stage_weights
from engine.loading.memory.device_survey import choose_state_checkpoints
from engine.loading.memory.expert_placement import assign_first_experts
from engine.loading.memory_estimate import build_host_experts, hosts_embedding
from engine.loading.open_store import build_layout, open_transfer, transfer_memory, with_store
from engine.loading.place_experts import make_load_plan
from engine.loading.plan_load import LoadPlan, ProvenPlan, prove_plan
from engine.loading.shard_peers import (
    RemotePeers,
    connect_peers,
    describe_draft,
    describe_scorer,
    describe_shard,
    find_peer,
    list_remote_flags,
    name_device,
)
from engine.loading.warm_up import warm_up, warm_up_sampling
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_catalog import choose_served_name
from engine.settings.model_options import ModelOptions, WeightOptions
from engine.settings.options import Options
from engine.settings.output import start_progress
from engine.settings.output.live_figures import LiveFigures, MemoryLedger, ModelBytes
from engine.settings.output.server_facts import CompressionFacts, ServerFacts
from engine.settings.paths import find_model_folder, find_user_folder
from engine.settings.user_error import UserError
from states.settings import Settings

log = logging.getLogger("rekindle")


@define
class LoadedModel:
    """A model that is ready to serve, with the facts that the engine and the HTTP server need."""

    folder: Path
    checkpoint: Checkpoint
    shard: Pipeline
    lane: DeviceLane
    executor: DeviceExecutor
    numerics: Numerics
    settings: Settings
    identity: str
    model_id: str
    mode: Literal["exact", "fast"]
    kv_dtype: str  # the formats of cached keys and values
    freezes: bool  # messages that have aged are shortened, which needs a prompt scorer
    scope: Scope  # of requests that do not name one
    calibrations: CalibrationCache
    compression: CompressionFacts
    draft: DraftModel | None = None
    scorer: LoadedScorer | None = None
    host_experts: HostExperts | None = None
    transfer: Transfer | None = None  # None: neither host memory nor disk keeps rows

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights, without experts in host memory."""
        held = self.shard.memory()
        return held["weights"] + held["host"]

    @property
    def details(self) -> ModelDetails:
        return ModelDetails(
            n_ctx_train=self.checkpoint.config.max_positions,
            dtype=str(self.shard.spec.dtype).removeprefix("torch."),
            kv_dtype=self.kv_dtype,
            size=self.weight_bytes,
            packed=tuple(self.checkpoint.packing_names),
            bits_per_weight=round(self.checkpoint.stored_bits, 2),
            bits_in_memory=round(self.checkpoint.compute_bits(self.weight_bytes), 2),
            quantize_error=self.checkpoint.rounding_error,
        )

    @property
    def facts(self) -> ServerFacts:
        """The facts for /props that do not change while it serves."""
        devices = ", ".join(dict.fromkeys(map(name_device, self.shard.parts)))
        return ServerFacts(self.model_id, self.identity, devices, self.details, self.compression, self.settings)

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        """Threads whose troubles /health reports."""
        store = () if self.transfer is None else self.transfer.store.threads
        return (*self.executor.threads, *store, *(() if self.scorer is None else self.scorer.threads))

    @property
    def has_disk(self) -> bool:
        return self.transfer is not None and bool(self.transfer.store.lower_tiers)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The other processes that have its shards."""
        return tuple(filter(None, map(find_peer, self.shard.parts)))

    @property
    def outages(self) -> Mapping[str, str]:
        """The reasons why shards are gone, by name. While one is gone, no request can be answered."""
        return {f"shard {peer.dial.name}": peer.gone for peer in self.peers if peer.gone}

    def collect_live(self) -> LiveFigures:
        """Return what changes while it serves."""
        damaged: Mapping[str, int] = self.calibrations.damaged
        if self.transfer is None:
            return LiveFigures(self.build_ledger(0), damaged, None, "off", self.outages)
        figures = self.transfer.store.collect_figures()
        return LiveFigures(
            self.build_ledger(figures.tiers["host"].bytes),
            {**damaged, **self.transfer.store.damaged_files},
            figures,
            str(self.scope) if self.has_disk else "off",
            self.outages,
            {f"tier {name}": why for name, why in self.transfer.store.troubles.items()},
        )

    def build_ledger(self, blocks: int) -> MemoryLedger:
        """Return where each model's weights are, and what slots, buffers and the cache take. blocks: bytes of blocks.

        Called on any thread.
        """
        target = self.shard.memory()
        host = target["host"] + (0 if self.host_experts is None else self.host_experts.host_bytes)
        draft = {} if self.draft is None else self.draft.memory()
        others = {"draft": draft, **({} if self.scorer is None else {"drafter": self.scorer.memory()})}
        models = {name: ModelBytes(sizes["weights"], sizes["host"]) for name, sizes in others.items() if sizes}
        return MemoryLedger(
            models={"target": ModelBytes(target["weights"], host), **models},
            experts=None if self.host_experts is None else self.host_experts.build_figures(),
            shards=tuple(describe_shard(part) for part in self.shard.parts),
            draft=None if self.draft is None else describe_draft(self.draft),
            drafter=None if self.scorer is None else describe_scorer(self.scorer),
            slots={"target": target["kv"], "draft": draft.get("kv", 0)},
            buffers={"target": target["buffers"], **{name: sizes.get("buffers", 0) for name, sizes in others.items()}},
            blocks={"host": blocks},
            pool={"host": 0 if self.transfer is None else self.transfer.store.memory.slab_bytes},
        )

    @property
    def numerics_line(self) -> str:
        buckets = self.numerics.buckets
        return f"numerics={self.mode} ({self.numerics.mode}, {buckets[0]}..{buckets[-1]} rows)"

    async def close(self) -> None:
        """Close the threads that copy rows first, then the lane, then the files of the store."""
        if self.transfer is not None:
            await anyio.to_thread.run_sync(self.transfer.saver.close)
        await anyio.to_thread.run_sync(self.executor.close)
        if self.draft is not None and find_peer(self.draft) is not None:  # its process would wait for more
            await anyio.to_thread.run_sync(self.draft.close)
        if self.scorer is not None:
            await anyio.to_thread.run_sync(self.scorer.close)
        if self.transfer is not None:
            await anyio.to_thread.run_sync(self.transfer.close)


def load_on_lane(
    options: Options, lane: DeviceLane, on_step: start_progress.StepListener, expected_identity: str | None = None
) -> LoadedModel:
    """Load a target on its lane. Raises UserError or IdentityMismatch.

    expected_identity: the one that the model must have; None: any.
    """
    folder = find_model_folder(options.model)
    checkpoint = Checkpoint.open(folder)
    experts_here = checkpoint.config.experts is not None and options.weights.cpu_expert_layers != 0
    if options.runtime.threads and (experts_here or any(device.type == "cpu" for device in lane.devices)):
        torch.set_num_threads(options.runtime.threads)
    peers = connect_peers(options, folder, checkpoint)
    try:
        target = load_with_peers(peers, checkpoint, options, lane, on_step=on_step, expected_identity=expected_identity)
    except RowsLost as error:
        peers.close()
        raise UserError(f"{list_remote_flags(options)}: {error}") from error
    except BaseException:
        peers.close()
        raise
    for peer in peers.shards:
        if peer is not None:
            peer.set_loss_listener(target.executor.lose_all_slots)
    return target


def load_with_peers(
    peers: RemotePeers,
    checkpoint: Checkpoint,
    options: Options,
    lane: DeviceLane,
    *,
    on_step: start_progress.StepListener,
    expected_identity: str | None,
) -> LoadedModel:
    """Load a target whose parts may be in other processes. peers: those processes, if any."""
    dtype = resolve_dtype(options.weights.dtype, checkpoint)
    checkpoint = choose_weights(options.weights, checkpoint, dtype)
    cache = CalibrationCache(find_user_folder(), proving=lambda: on_step(start_progress.PROBE))
    opened_draft = find_draft(options, checkpoint)
    load_plan = make_load_plan(options, checkpoint, dtype, peers, opened_draft, kept=cache)
    options = load_plan.options
    plan = load_plan.placements
    memory = transfer_memory(options.cache, [placement.device for placement in plan], peers.lender)
    counted = checkpoint.with_hook(start_progress.make_weight_counter(on_step, len(checkpoint.tensors)))
    with warm_up_sampling(plan, checkpoint.config.vocab_size), stage_weights(counted, plan, memory, dtype) as sources:
        proven = prove_plan(load_plan, load_plan.choose_fit(), kept=cache, on_step=on_step)
        numerics = proven.numerics
        check_identity(proven.identity, expected_identity)
        usable_draft = peers.close_unused_draft(drop_unverifiable_draft(opened_draft, numerics))
        found_scorer = find_scorer(options, checkpoint.folder, plan[-1].device, proven.fit.context, peer=peers.scorer)
        on_step(start_progress.WEIGHTS)
        host_experts = build_host_experts(options, checkpoint, dtype, plan)
        fast = options.runtime.numerics == "fast"
        common = plan_shard_placement(load_plan, proven, usable_draft)
        shard = build_shards(counted, plan, proven.kernels, sources, common, experts=host_experts, fast=fast)
    assign_first_experts(host_experts)
    parts = ExecutorParts(shard, numerics.buckets, lane, fast=fast, experts=host_experts)
    neighbours = DraftNeighbours(shard, get_last_kernels(proven.kernels.shards), numerics, cache, peers.draft)
    parts, proposer = add_proposers(parts, usable_draft, options, checkpoint, neighbours, on_step=on_step)
    draft = None if proposer is None else proposer.draft
    on_step(start_progress.WARM_UP)
    warm_up(shard, draft, BATCH_ROWS)
    on_step(start_progress.MEASURE)
    settings = choose_settings(options, parts, shard, draft, found_scorer, plan=plan, proven=proven, kept=cache)
    scorer, settings = add_scorer(found_scorer, options, lane, settings=settings, calibrations=cache)
    on_step(start_progress.CACHE)
    layout = build_layout(shard, draft, proven.identity, numerics.block_size)
    transfer = open_transfer(
        options.cache, options.shared_tier, layout, shard, parts.slots, lane=lane, drafting=proposer, memory=memory
    )
    settings = settings if transfer is None else with_store(settings, transfer, shard, chunk=numerics.chunk, kept=cache)
    parts = with_kept_answers(parts, None if transfer is None else transfer.store.answers)
    executor = build_executor(parts, settings, drafting=proposer, scorer=scorer, transfer=transfer)
    offload_unused_draft(proposer, settings)
    return LoadedModel(
        folder=find_model_folder(options.model),
        checkpoint=checkpoint,
        shard=shard,
        lane=lane,
        executor=executor,
        numerics=numerics,
        settings=settings,
        identity=proven.identity,
        model_id=choose_model_id(options.model),
        mode=options.runtime.numerics,
        kv_dtype=read_row_types(options.weights.kv_dtype, dtype).name,
        freezes=options.cache.disk_prefix_cache_compress,
        scope=options.cache.default_scope,
        calibrations=cache,
        draft=draft,
        scorer=scorer,
        host_experts=host_experts,
        compression=describe_compression(options, settings, scorer),
        transfer=transfer,
    )


def choose_weights(weights: WeightOptions, checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    """Return the checkpoint with its weights to be rounded to `--quantize` bits, if any, and to be read in `dtype`.

    Experts in host memory are unpacked, because all of them must have one form there.
    """
    if weights.device_expert_bytes is not None:
        checkpoint = checkpoint.with_unpacked_experts()
    if weights.quantized_bits:
        checkpoint = checkpoint.with_quantisation(weights.quantized_bits)
    return checkpoint.with_dtype(dtype)


def plan_shard_placement(plan: LoadPlan, proven: ProvenPlan, draft: FoundDraft | None) -> ShardPlacement:
    """Return the slots, rows and types that all shards of the target have. Each gets its device and layers later."""
    options = plan.options
    checkpoint = plan.checkpoint
    asked = options.checkpoints.state_checkpoints
    return ShardPlacement(
        dtype=plan.dtype,
        rows=read_row_types(options.weights.kv_dtype, plan.dtype),
        slots=proven.fit.slots + proven.fit.spare,
        capacity=proven.fit.context,
        buckets=row_counts(proven.numerics.buckets, fast=options.runtime.numerics == "fast"),
        aux_layers=() if draft is None else draft.shape.aux_layers,
        state_checkpoints=choose_state_checkpoints(asked, checkpoint.config, plan.dtype, plan.placements),
        pages=proven.fit.pages,
        offload_embedding=hosts_embedding(checkpoint.config, plan.dtype, plan.placements, checkpoint.layouts),
    )


def choose_model_id(model: ModelOptions) -> str:
    """Return the name of the model in answers: of a demo, or of its repository, folder or file."""
    return model.model if model.model in demo.FOLDERS else choose_served_name(find_model_folder(model))
