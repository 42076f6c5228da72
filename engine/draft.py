"""The draft beside a target: found, checked, loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from attrs import evolve

from adapters import demo
from adapters.checkpoint.errors import CheckpointError
from adapters.models.dflash.checkpoint import DraftCheckpoint
from adapters.models.dflash.draft import DFlashDraft
from adapters.models.dflash.weights import products as draft_products
from adapters.models.family import ModelConfig
from adapters.models.kernels.interface import Kernels
from adapters.models.numerics import Numerics, kept_under, plan_from_json, plan_to_json
from adapters.models.shard import Shard
from engine.kept import Kept
from engine.options import Options
from engine.refusal import Refusal

log = logging.getLogger("rekindle")


def find_draft(options: Options, config: ModelConfig, numerics: Numerics) -> DraftCheckpoint | None:
    """The folder that was asked for, or the demo's own. Raises Refusal for one that cannot draft for this target."""
    folder = Path(options.draft)
    if options.draft == "auto":
        folder = demo.FOLDER / "draft"
        if options.model != "demo" or not (folder / "config.json").is_file():
            return None
    if options.draft == "none":
        if options.ddtree:
            log.warning("--ddtree: there is no draft whose proposals could branch (--draft none)")
        return None
    try:
        found = DraftCheckpoint.open(folder, config)
    except CheckpointError as error:
        raise Refusal(f"--draft {error}") from error
    if numerics.mode != "buckets":
        log.warning("no draft: its proposals could not be verified exactly, since row counts differ here")
        return None
    return found


def draft_kernels(
    found: DraftCheckpoint,
    config: ModelConfig,
    shard: Shard,
    kernels: Kernels,
    *,
    numerics: Numerics,
    kept: Kept,
    fast: bool,
) -> Kernels:
    """Of the kind of the target's, `kernels`. What the draft multiplies beyond its target's products is proven beside
    them, so another draft changes no answer.

    A draft whose products cannot be proven drafts all the same, but what it proposes after a restore may differ.
    """
    plan = numerics.plan
    if plan is None:
        return kernels.fresh()
    target = config.products(plan.steps, capacity=shard.capacity, dtype=shard.dtype, threads=plan.threads[1])
    listed = draft_products(
        found.config, evolve(target, threads=plan.threads), capacity=shard.capacity, vocab=config.vocab_size
    )
    key = kept_under(listed, kernels, shard.device, (str(shard.dtype), plan))
    proven = kept.made(key, lambda: kernels.prove(listed, plan).plan, plan_to_json, plan_from_json)
    return kernels.using(evolve(proven, steps=()) if fast and proven is not None else proven)


def load_draft(found: DraftCheckpoint, shard: Shard, kernels: Kernels) -> DFlashDraft:
    """Beside the target, whose embedding and head it shares."""
    try:
        return DFlashDraft(
            found.config,
            found,
            kernels,
            shard.head,
            device=shard.device,
            dtype=shard.dtype,
            slots=shard.slots,
            capacity=shard.capacity,
            buckets=shard.buckets,
        )
    except torch.OutOfMemoryError as error:
        why = "fewer --slots, a smaller --max-ctx or --draft none may help"
        raise Refusal(f"the draft does not fit {shard.device} beside the model: {why}") from error
    except ValueError as error:
        raise Refusal(f"--draft {found.folder}: {error}") from error


def short_of_memory(device: torch.device) -> bool:
    """With everything loaded: does the device have less than a twentieth of its memory left? A CPU can page."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free * 20 < total
