"""Where what slots keep is kept beyond the device, as the options ask for it."""

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
from adapters.models.decoder.pipeline import Pipeline
from adapters.remote.protocol.lent_memory import Lender
from adapters.store.disk_tier import Disk
from adapters.store.files.file_format import Draft, Layout
from adapters.store.files.private_folder import FolderUnusable
from adapters.store.open_store import held_memory, open_store
from adapters.store.slab_memory import Memory
from adapters.store.store import Store
from adapters.transfer.transfer import Transfer, transfer
from adapters.watched_thread import Watched
from effects.scope import parse_scope
from engine.loading.calibrate_restore import with_loading
from engine.settings.calibration_cache import Kept
from engine.settings.options import Options
from engine.settings.paths import cache_folder
from engine.settings.user_error import UserError
from states.settings import Settings

log = logging.getLogger("rekindle")


def layout(shard: Pipeline, draft: DraftModel | None, named: str, block_size: int) -> Layout:
    kept = None if draft is None else Draft(draft.identity, draft.row_spec)
    return Layout(named, block_size, shard.row_spec, kept, shard.state_specs)


def disk_folder(options: Options) -> Path | None:
    """Where things are kept on disk, if anything is to be."""
    if parse_scope(options.disk_prefix_cache).kind == "off" or not options.kv_cache_budget:
        return None
    return options.kv_cache_dir or cache_folder()


def transfer_memory(options: Options, devices: Iterable[torch.device], lender: Lender | None) -> Memory:
    """What is copied to and from devices passes through it, weights that are loaded included; and it is where host
    memory keeps what it keeps. Pinned for a GPU; else processes of ours see it, where there are any.
    """
    pin = any(device.type == "cuda" for device in devices)
    return held_memory(options.host_cache_budget << 20, pin=pin, source=None if lender is None else lender.take)


def build_store(options: Options, layout: Layout, memory: Memory) -> Store[Disk] | None:
    """What the options ask for. Only a folder that somebody chose is worth refusing to start for."""
    folder = disk_folder(options)
    limits: dict[str, Any] = {
        "host_bytes": options.host_cache_budget << 20,
        "disk_bytes": options.kv_cache_budget << 20,
        "codec": options.kv_cache_codec,
        "memory": memory,
    }
    try:
        return open_store(layout, folder, **limits)
    except FolderUnusable as error:
        if options.kv_cache_dir is not None:
            raise UserError(f"--kv-cache-dir {error}") from error
        log.warning("prompts are not kept on disk: %s", error)
        return open_store(layout, None, **limits)


def keeping(
    options: Options,
    kind: Layout,
    shard: Pipeline,
    slots: SlotTable,
    lane: DeviceLane,
    *,
    drafting: DraftProposer[Any] | None,
    memory: Memory,
) -> Transfer | None:
    """What is kept of slots beyond the device, and how it comes there and back, if the options ask for it."""
    store = build_store(options, kind, memory)
    if store is None:
        return None
    follow = (lambda _: None) if drafting is None else drafting.catch_up
    draft = None if drafting is None else drafting.draft
    return transfer(store, shard.parts, lane, slots.find, draft=draft, catch_up=follow)


def stored(settings: Settings, moving: Transfer, shard: Pipeline, *, chunk: int, kept: Kept) -> Settings:
    """Something is kept beyond the device, and what loading it takes is known."""
    rates = with_loading(settings.rates, moving.store, shard, chunk=chunk, kept=kept)
    Watched("store-pool", moving.store.memory.fill).start()  # now that nothing is timed any more
    return evolve(settings, store=True, rates=rates)
