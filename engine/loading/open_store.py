"""Opens the store that keeps rows in host memory and on disk, as the options ask for it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slot_table import SlotTable
from adapters.device.speculation.drafting import DraftProposer
from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.remote.protocol.lent_memory import Lender
from adapters.store.files.file_format import DraftLayout, Layout
from adapters.store.files.private_folder import FolderUnusable
from adapters.store.open_store import SharedStoreSettings, create_memory, open_store
from adapters.store.shared.store_url import StoreUnusable
from adapters.store.slab_memory import SlabMemory
from adapters.store.store import Store
from adapters.store.tier import ReadableTier
from adapters.transfer.transfer import Transfer, create_transfer
from adapters.watched_thread import WatchedThread
from engine.loading.calibration.calibrate_restore import add_restore_times
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.paths import find_cache_folder
from engine.settings.server_options import CacheOptions, SharedTierOptions
from engine.settings.user_error import UserError
from states.settings import Settings

log = logging.getLogger("rekindle")


def build_layout(shard: Pipeline, draft: DraftModel | None, named: str, block_size: int) -> Layout:
    """Return the layout of snapshot files: rows of the target and of its draft, and recurrent states."""
    has_rows = draft is not None and bool(draft.rows.spec.names)
    kept = DraftLayout(draft.identity, draft.rows.spec) if draft is not None and has_rows else None
    return Layout(named, block_size, shard.rows.spec, kept, shard.states.specs)


def disk_folder(cache: CacheOptions) -> Path | None:
    """Return the folder of the disk tier, or None if there is none."""
    if not (cache.uses_disk and cache.kv_cache_budget):
        return None
    return cache.kv_cache_dir or find_cache_folder()


def find_shared_store(options: SharedTierOptions) -> SharedStoreSettings | None:
    """Return where the shared tier is, or None if there is none."""
    if not options.kv_shared_tier:
        return None
    return SharedStoreSettings(options.kv_shared_tier, options.kv_shared_budget << 20, options.kv_shared_max_age * 3600)


def transfer_memory(cache: CacheOptions, devices: Iterable[torch.device], lender: Lender | None) -> SlabMemory:
    """Return the memory through which rows and weights are copied to and from devices, and which the host tier uses.

    It is pinned for a GPU. Otherwise it is shared with processes that were launched here, if there are any.
    """
    pin = any(device.type == "cuda" for device in devices)
    return create_memory(cache.host_cache_budget << 20, pin=pin, source=None if lender is None else lender.take)


def build_store(
    cache: CacheOptions, shared_tier: SharedTierOptions, layout: Layout, memory: SlabMemory
) -> Store[ReadableTier] | None:
    """Return the store. A folder that cannot be used stops the start only if it was named by an option.

    A shared store that cannot be used always stops it: it was named, and a server without it would seem to work.
    """
    folder = disk_folder(cache)
    shared = find_shared_store(shared_tier)

    def open_with(chosen: Path | None) -> Store[ReadableTier] | None:
        return open_store(
            layout,
            chosen,
            host_bytes=cache.host_cache_budget << 20,
            disk_bytes=cache.kv_cache_budget << 20,
            codec=cache.kv_cache_codec,
            memory=memory,
            shared=shared,
        )

    try:
        return open_with(folder)
    except StoreUnusable as error:
        raise UserError(f"--kv-shared-tier {shared_tier.kv_shared_tier}: {error}") from error
    except FolderUnusable as error:
        if cache.kv_cache_dir is not None:
            raise UserError(f"--kv-cache-dir {error}") from error
        log.warning("prompts are not kept on disk: %s", error)
        return open_with(None)


def open_transfer(
    cache: CacheOptions,
    shared_tier: SharedTierOptions,
    kind: Layout,
    shard: Pipeline,
    slots: SlotTable,
    *,
    lane: DeviceLane,
    drafting: DraftProposer[Any] | None,
    memory: SlabMemory,
) -> Transfer | None:
    """Return what copies rows between slots and the store, or None if the options ask for no store."""
    store = build_store(cache, shared_tier, kind, memory)
    if store is None:
        return None
    follow = (lambda _: None) if drafting is None else drafting.catch_up
    draft = None if drafting is None else drafting.draft.rows
    return create_transfer(store, shard.parts, lane, slots.find, draft=draft, catch_up=follow)


def with_store(
    settings: Settings, moving: Transfer, shard: Pipeline, *, chunk: int, kept: CalibrationCache
) -> Settings:
    """Return the settings with a store and the measured rates of loading from it."""
    rates = add_restore_times(settings.rates, moving.store, shard, chunk=chunk, kept=kept)
    # It starts now, because no more times are measured.
    WatchedThread("store-pool", moving.store.memory.register_all).start()
    if moving.store.upkeep is not None:
        moving.store.upkeep.start()
    return evolve(settings, store=True, rates=rates)
