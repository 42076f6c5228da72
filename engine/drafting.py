"""A draft put to work: placed, asked by the executor, and sent away where nobody needs it yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.device.drafting import Drafting, DraftProposer
from adapters.device.executor import DeviceExecutor
from adapters.device.proposer import DraftModel
from adapters.models.checkpoint import Checkpoint
from adapters.models.kernels.interface import Kernels
from adapters.models.pipeline import Pipeline
from adapters.remote.draft import RemoteDraft
from adapters.remote.drafting import RemoteDrafting
from effects.ids import RequestId
from effects.residency import LoadModel, UnloadModel
from engine import startup
from engine.draft import FoundDraft, placed_draft
from engine.options import Options
from states.residency import unload
from states.settings import Settings


def sent_away(drafting: DraftProposer[DraftModel] | None, settings: Settings) -> None:
    """Nobody needs the draft yet."""
    if drafting is not None and settings.residency.draft != "keep":
        drafting.park(RequestId(0), unload(settings.residency, "draft"))


def beside_last(kernels: Sequence[Kernels | None]) -> Kernels:
    """Those of the last layers: in this process, wherever the layers are."""
    last = kernels[-1]
    assert last is not None
    return last


def add_draft(
    found: FoundDraft | None,
    options: Options,
    checkpoint: Checkpoint,
    shard: Pipeline,
    *,
    executor: DeviceExecutor,
    step: startup.StepHeard,
    **placing: Any,
) -> DraftProposer[Any] | None:
    """At work for the executor. placing: of `placed_draft`."""
    if found is None:
        return None
    step(startup.DRAFT)
    draft = placed_draft(found, options, checkpoint, shard, **placing)
    if isinstance(draft, RemoteDraft):
        drafting: DraftProposer[Any] = RemoteDrafting(draft, shard.buckets)
        draft.told(executor.reach)
    else:
        drafting = Drafting(draft, shard.buckets, options.ddtree_budget)
    executor.proposed_to(drafting)
    executor.handle(LoadModel, drafting.unpark)
    executor.handle(UnloadModel, drafting.park)
    return drafting
