"""Loads the draft that was found: its device, its kernels and its numerics."""

from __future__ import annotations

import logging
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.device.speculation.proposer import DraftModel
from adapters.models.decoder.config.dense_config import HEAD_ROWS
from adapters.models.decoder.embedding_and_head import CopiedEnds
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import CachedDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Weight
from adapters.models.numerics.probe_result import Numerics, build_proof_key, plan_from_json, plan_to_json
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.protocol.load_request import build_draft_request
from effects.ports import RowsLost
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.memory.device_survey import Placement, build_kernels, choose_device
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_options import SpeculationOptions
from engine.settings.options import Options
from engine.settings.user_error import UserError, build_memory_error

log = logging.getLogger("rekindle")

# The numbers of proposals of the decode steps that are measured at start.
WIDTHS = (3, 7, 15)
BATCH_ROWS = 64  # rows of one batched decode step at most
FEWER = "fewer --slots, a smaller --max-ctx or --draft none"


def choose_draft_device(speculation: SpeculationOptions, target: torch.device) -> torch.device:
    """Return the device of the draft: the option's, or the device `target` of the last layers. Raises UserError."""
    if not speculation.draft_device or speculation.remote_location is not None:
        return target
    found = choose_device(speculation.draft_device, "--draft-device")
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else torch.device("cpu")


def build_draft_kernels(found: FoundDraft, config: ModelConfig, neighbours: DraftNeighbours, *, fast: bool) -> Kernels:
    """Return kernels for a draft on the device of its target's last layers, of the same kind as theirs.

    The draft's own products are proven in addition to those of the target, so another draft changes no answer. A draft
    whose products cannot be proven is used as well, but its proposals after a restore may differ.
    """
    kernels = neighbours.kernels
    spec = neighbours.shard.spec
    plan = neighbours.numerics.plan
    if plan is None:
        return kernels.copy_for_shard()
    target = config.products(plan.steps, capacity=spec.capacity, dtype=spec.dtype, threads=plan.threads[1])
    listed = found.products(evolve(target, threads=plan.threads), capacity=spec.capacity, vocab=config.vocab_size)
    key = build_proof_key(listed, kernels, spec.device, (str(spec.dtype), plan))
    proven = neighbours.kept.load_or_make(key, lambda: kernels.prove(listed, plan).plan, plan_to_json, plan_from_json)
    return kernels.with_plan(evolve(proven, steps=()) if fast and proven is not None else proven)


def plan_draft_placement(speculation: SpeculationOptions, target: torch.device, peer: Peer | None = None) -> Placement:
    """Return where the draft goes. target: as in `choose_draft_device`. peer: the process that has it. Raises
    UserError.
    """
    if peer is not None:
        return Placement(range(0), torch.device("cpu"), peer)
    return Placement(range(0), choose_draft_device(speculation, target))


@frozen(eq=False)
class DraftNeighbours:
    """The target of a draft, with the numerics of the target.

    kernels: of the target's last layers. peer: the process that has the draft, or None.
    """

    shard: Pipeline
    kernels: Kernels
    numerics: Numerics
    kept: CalibrationCache
    peer: Peer | None = None

    @property
    def device(self) -> torch.device:
        """The device of the target's last layers."""
        return self.shard.spec.device

    def limit_nodes(self, nodes: int) -> int:
        """Return the most nodes of a tree that the target can verify: this number, or 0 if it verifies chains only."""
        return 0 if self.shard.states.tree_obstacle else nodes

    def place_draft(self, device: torch.device) -> DraftPlacement:
        """Return the placement of a draft on this device, with the slots, rows and buckets of its target."""
        spec = self.shard.spec
        return DraftPlacement(
            device=device, dtype=spec.dtype, slots=spec.slots, capacity=spec.capacity, buckets=spec.buckets
        )


def build_own_kernels(
    found: FoundDraft, config: ModelConfig, placement: DraftPlacement, *, kept: CalibrationCache, fast: bool
) -> Kernels:
    """Return kernels for a device that has no layers of the target.

    All products of the draft are proven there, the head too.
    """
    dtype = placement.dtype
    capacity = placement.capacity
    with use_device(placement.device):
        kernels = build_kernels(placement.device, dtype)
        threads = torch.get_num_threads()
        target = config.products(placement.buckets, capacity=capacity, dtype=dtype, threads=threads)
        own = found.products(target, capacity=capacity, vocab=config.vocab_size)
        head = Weight(config.vocab_size, config.hidden_size, most=HEAD_ROWS)
        listed = evolve(own, weights=tuple(dict.fromkeys((*own.weights, head))))
        key = build_proof_key(listed, kernels, placement.device, (str(dtype), "apart"))
        proven = kept.load_or_make(key, lambda: kernels.prove(listed).plan, plan_to_json, plan_from_json)
        return kernels.with_plan(evolve(proven, steps=()) if fast and proven is not None else proven)


def load_draft(found: FoundDraft, options: Options, checkpoint: Checkpoint, neighbours: DraftNeighbours) -> DraftModel:
    """Load the draft where it was asked for. Raises UserError."""
    fast = options.runtime.numerics == "fast"
    config = checkpoint.config
    if neighbours.peer is not None:
        kernels = build_draft_kernels(found, config, neighbours, fast=fast)
        return load_remote_draft(found, options, neighbours, neighbours.peer, kernels=kernels)
    device = choose_draft_device(options.speculation, neighbours.device)
    placement = neighbours.place_draft(device)
    shares_device = device == neighbours.device
    if shares_device:
        own = build_draft_kernels(found, config, neighbours, fast=fast)
    else:
        own = build_own_kernels(found, config, placement, kept=neighbours.kept, fast=fast)
    try:
        return build_draft(found, placement, own, checkpoint, head=neighbours.shard.head if shares_device else None)
    except torch.OutOfMemoryError as error:
        raise build_memory_error("the draft", f"{device} beside the model", FEWER, error) from error
    except ValueError as error:
        raise UserError(f"--draft {found.name}: {error}") from error


def load_remote_draft(
    found: FoundDraft,
    options: Options,
    neighbours: DraftNeighbours,
    peer: Peer,
    *,
    kernels: Kernels,
) -> RemoteDraft:
    """Load a draft in another process. Raises UserError.

    kernels: for the projection, which runs on the device of the target's last layers.
    """
    device = neighbours.device
    placement = neighbours.place_draft(device)
    request = build_draft_request(
        found.shape,
        placement,
        bits=options.weights.quantized_bits,
        nodes=neighbours.limit_nodes(options.speculation.ddtree_budget),
        rows=BATCH_ROWS,
        fast=options.runtime.numerics == "fast",
    )
    try:
        projection = found.projection(kernels, device, placement.dtype)
        return RemoteDraft(peer, request, found.shape, found.digests, projection)
    except torch.OutOfMemoryError as error:
        raise build_memory_error("the draft", peer.dial.name, FEWER, error) from error
    except (ValueError, RowsLost) as error:
        raise UserError(f"--draft-device {peer.dial.name}: {error}") from error


def build_draft(
    found: FoundDraft,
    placement: DraftPlacement,
    kernels: Kernels,
    checkpoint: Checkpoint,
    *,
    head: TargetHead | None = None,
) -> CachedDraft[Any]:
    """Build a draft. head: the target's head, if it is on the same device; None: the draft gets a copy of its own."""

    def copy_head() -> TargetHead:
        return CopiedEnds(checkpoint.config, checkpoint, kernels, placement.dtype, placement.device).head

    return found.build(kernels, copy_head if head is None else head, placement)


def is_short_of_memory(device: torch.device, coming: int = 0) -> bool:
    """Return whether less than a twentieth of the device's memory is left once everything is loaded. A CPU can page."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return (free - coming) * 20 < total


def count_most_proposals(draft: DraftModel | None, shard: Pipeline) -> int:
    """Return the most proposals of one decode step.

    If the model has recurrent state, only one block can be rolled back: the token that is fed, and the proposals after
    it.
    """
    wanted = 0 if draft is None else draft.block - 1
    most = min(wanted, shard.states.block - 1) if shard.states.specs else wanted
    if most < wanted:
        log.warning(
            "the draft could propose %d tokens at once, but only %d can be undone here, so no more are requested",
            wanted,
            most,
        )
    return most


def choose_proposal_widths(block: int, tree: int) -> list[int]:
    """Return the numbers of proposals whose decode steps are measured. block: most of a chain; tree: of a tree."""
    return sorted({0, block, max(block, tree), *(width for width in WIDTHS if width < block)})
