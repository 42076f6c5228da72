"""`--cpu-experts`: decides of which layers the host computes the experts.

A number is taken as it is. With `auto` nothing happens as long as the weights fit their devices. Otherwise the least
number of layers is found with which they fit, and the core decides from measured times (`states/experts.py`): the host
computes the experts of these layers, or they are brought to the device as with `--experts host`.

The number changes bits. So the first start decides, and later ones keep what it found as long as that fits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from attrs import asdict, evolve

from adapters.models.decoder.expert_products import list_expert_layers
from adapters.models.open_checkpoint import Checkpoint
from engine.loading.calibration.expert_prices import measure_expert_prices
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.memory.device_survey import Placement, plan_placement
from engine.loading.memory_estimate import compute_fit, estimate_needs
from engine.loading.plan_load import LoadPlan
from engine.loading.shard_peers import RemotePeers
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.options import Options, evolve_options
from engine.settings.user_error import UserError
from states.experts import ExpertPlacement, ExpertPrices, choose_expert_placement

log = logging.getLogger("rekindle")
LEAST_CONTEXT = 8192  # tokens that must fit next to the weights, or as many as the model allows
_VERSION = 1  # of what is kept


def make_load_plan(
    options: Options,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    peers: RemotePeers,
    draft: FoundDraft | None,
    *,
    kept: CalibrationCache,
) -> LoadPlan:
    """Return where the layers of a target go, and of which the host computes the experts. Raises UserError."""
    placements = plan_placement(options.placement, checkpoint.config, peers.shards)
    return place_cpu_experts(LoadPlan(options, checkpoint, dtype, placements, draft, peers.draft), kept)


def place_cpu_experts(plan: LoadPlan, kept: CalibrationCache | None) -> LoadPlan:
    """Return the plan with the layers whose experts the host computes. Raises UserError.

    kept: measured times and earlier decisions. None: nothing is measured, and the host is presumed to be quicker.
    """
    asked = plan.options.weights.cpu_expert_layers
    layers = list_expert_layers(plan.checkpoint.config)
    if asked is None:
        return choose_automatically(plan, layers, kept) if can_choose(plan, layers) else plan
    if not asked:
        return plan
    if not layers:
        raise UserError(f"--cpu-experts {asked}: the model has no experts; accepted: auto, 0")
    found = assign_cpu_experts(plan, layers, asked)
    if any(placement.cpu_experts and not placement.is_local for placement in found.placements):
        raise UserError(f"--cpu-experts {asked}: some of these layers are in another process, which computes its own")
    return found


def assign_cpu_experts(plan: LoadPlan, layers: Sequence[int], count: int) -> LoadPlan:
    """Return the plan in which the host computes the experts of the first `count` layers, as far as these have any."""

    def assign(place: Placement) -> Placement:
        own = [layer for layer in layers if layer < count and layer in place.layers]
        return evolve(place, cpu_experts=range(own[0], own[-1] + 1) if own else range(0))

    return evolve(plan, placements=tuple(map(assign, plan.placements)))


def can_choose(plan: LoadPlan, layers: Sequence[int]) -> bool:
    """Return whether there is a choice: experts, devices of this process with a GPU among them, and nothing asked."""
    local = all(placement.is_local for placement in plan.placements)
    on_cuda = any(placement.device.type == "cuda" for placement in plan.placements)
    return bool(layers) and local and on_cuda and plan.options.weights.device_expert_bytes is None


def choose_automatically(plan: LoadPlan, layers: Sequence[int], kept: CalibrationCache | None) -> LoadPlan:
    """Return the plan with the placement that fits and is quickest, or as it is if its weights fit or nothing helps."""

    def fits(count: int) -> bool:
        return has_room(assign_cpu_experts(plan, layers, count))

    if fits(0):
        return plan
    counts = [layer + 1 for layer in layers]
    least = find_least(counts, fits)
    if least is None:
        return plan
    if kept is None:
        return assign_cpu_experts(plan, layers, least)
    found = kept.load_or_make(build_key(plan), lambda: decide(plan, least), to_json, from_json)
    if not found.brings and not fits(found.cpu_layers):
        log.warning("--cpu-experts: less memory is free than at the first start, so answers will be computed anew")
        found = ExpertPlacement(least)
    if found.brings:
        return evolve(plan, options=evolve_options(plan.options, experts="host"))
    return assign_cpu_experts(plan, layers, found.cpu_layers)


def decide(plan: LoadPlan, least: int) -> ExpertPlacement:
    """Decide by measured times. least: layers whose experts have to leave the device."""
    config = plan.checkpoint.config
    assert config.experts is not None
    if len(plan.placements) > 1:  # experts are brought to a single device only
        return ExpertPlacement(least)
    [place] = plan.placements
    prices = measure_expert_prices(plan.checkpoint, plan.dtype, place.device)
    found = choose_expert_placement(prices, least, config.experts.chosen)
    log_decision(prices, found, config.experts.chosen)
    return found


def log_decision(prices: ExpertPrices, found: ExpertPlacement, chosen: int) -> None:
    took = f"{prices.compute_ns / 1e6:.2f} ms a layer on the CPU, {chosen * prices.bring_ns / 1e6:.2f} ms to bring"
    where = "are brought to the device" if found.brings else f"of {found.cpu_layers} layers stay on the CPU"
    log.info("the weights do not fit the device: experts %s (%s)", where, took)


def has_room(plan: LoadPlan) -> bool:
    """Return whether there is room for a useful context with the weights."""
    config = plan.checkpoint.config
    asked = estimate_needs(
        plan.options,
        config,
        plan.dtype,
        plan.placements,
        plan.draft,
        peer=plan.remote_draft,
        layouts=plan.checkpoint.layouts,
    )
    fit = compute_fit(plan.options.runtime, asked, config.max_positions, plan.placements)
    return fit.fits and fit.context >= min(LEAST_CONTEXT, plan.options.runtime.max_ctx or config.max_positions)


def find_least(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the least of the ascending counts that fits, or None. More layers take less of the device."""
    low = 0
    high = len(counts)
    while low < high:
        middle = (low + high) // 2
        if fits(counts[middle]):
            high = middle
        else:
            low = middle + 1
    return counts[low] if low < len(counts) and fits(counts[low]) else None


def build_key(plan: LoadPlan) -> str:
    """Return the key of a decision: 32 hex digits over what it depends on, without memory that happens to be free."""
    devices = [
        (
            str(placement.device),
            torch.cuda.get_device_name(placement.device),
            torch.cuda.get_device_properties(placement.device).total_memory,
        )
        for placement in plan.placements
        if placement.device.type == "cuda"
    ]
    runtime = plan.options.runtime
    asked = (runtime.slots, runtime.max_ctx, runtime.kv_memory, plan.options.weights.kv_dtype)
    model = (
        repr(plan.checkpoint.config),
        str(plan.dtype),
        sorted({str(layout) for layout in plan.checkpoint.layouts.values()}),
    )
    draft = None if plan.draft is None else plan.draft.weights
    parts = (_VERSION, model, devices, asked, draft, torch.get_num_threads())
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def to_json(found: ExpertPlacement) -> str:
    return json.dumps({"version": _VERSION, **asdict(found)})


def from_json(text: str) -> ExpertPlacement:
    """Read the text of `to_json`. Raises ValueError for any other text."""
    match json.loads(text):
        case {"version": number, "cpu_layers": int(count), "brings": bool(brings), **more} if (
            number == _VERSION and not more and count >= 0
        ):
            return ExpertPlacement(count, brings)
        case _:
            raise ValueError("not what this version keeps of the placement of experts")
