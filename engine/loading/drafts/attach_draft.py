"""Connect a loaded draft with its executor, and offload it while no request needs it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from adapters.device.device_events import DeviceEventPort, DraftProcessChanged
from adapters.device.executor_parts import ExecutorParts
from adapters.device.speculation.drafting import Drafting, DraftProposer
from adapters.device.speculation.proposer import DraftModel, TextProposer
from adapters.device.speculation.suffix_proposer import AnswerKeeper, SuffixProposer
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.text_matching import MOST_BRANCH, MOST_COPIED
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.attach_remote_draft import RemoteDrafting
from adapters.remote.client.remote_draft import RemoteDraft
from effects.ids import RequestId
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.drafts.load_draft import DraftNeighbours, load_draft
from engine.settings.options import Options
from engine.settings.output import start_progress
from engine.settings.paths import AUTO, copies_text
from states.residency import make_unload
from states.settings import Settings

log = logging.getLogger("rekindle")


def offload_unused_draft(drafting: DraftProposer[DraftModel] | None, settings: Settings) -> None:
    """Offload the draft, since no request needs it yet."""
    if drafting is not None and settings.residency.draft != "keep":
        drafting.offload(RequestId(0), make_unload(settings.residency, "draft"))


def get_last_kernels(kernels: Sequence[Kernels | None]) -> Kernels:
    """Return the kernels for the last layers, which are in this process wherever the layers are."""
    last = kernels[-1]
    assert last is not None
    return last


def add_proposers(
    parts: ExecutorParts,
    found: FoundDraft | None,
    options: Options,
    checkpoint: Checkpoint,
    neighbours: DraftNeighbours,
    *,
    on_step: start_progress.StepListener,
) -> tuple[ExecutorParts, DraftProposer[Any] | None]:
    """Return the parts of an executor with all that proposes tokens, and the draft among them, if one was found."""
    drafting = add_draft(found, options, checkpoint, neighbours, events=parts.events, on_step=on_step)
    copying = build_text_proposer(options, neighbours)
    return evolve(parts, proposer=drafting, text_proposer=copying), drafting


def add_draft(
    found: FoundDraft | None,
    options: Options,
    checkpoint: Checkpoint,
    neighbours: DraftNeighbours,
    *,
    events: DeviceEventPort,
    on_step: start_progress.StepListener,
) -> DraftProposer[Any] | None:
    """Return the draft that was found, ready for an executor.

    events: where a draft in another process reports that this process is gone, or there again.
    """
    if found is None:
        return None
    on_step(start_progress.DRAFT)
    draft = load_draft(found, options, checkpoint, neighbours)
    buckets = neighbours.shard.spec.buckets
    if isinstance(draft, RemoteDraft):
        drafting: DraftProposer[Any] = RemoteDrafting(draft, buckets)
        draft.set_presence_listener(lambda is_there: events.report(DraftProcessChanged(is_there)))
    else:
        drafting = Drafting(draft, buckets, neighbours.limit_nodes(options.speculation.ddtree_budget))
    return drafting


def build_text_proposer(options: Options, neighbours: DraftNeighbours) -> SuffixProposer | None:
    """Return what copies earlier text, if the options want it and copies can be verified exactly.

    Only where copies were asked for, a warning says why there are none.
    """
    asked = options.speculation.draft
    if not copies_text(asked, options.model.model):
        return None
    level = logging.INFO if asked == AUTO else logging.WARNING
    if neighbours.numerics.mode != "buckets":
        log.log(
            level, "nothing is copied: proposals cannot be verified exactly, because batch sizes change the bits here"
        )
        return None
    matcher = build_text_matcher()
    if matcher is None:
        log.log(level, "--draft %s: nothing is copied, because there is no compiled library", asked)
        return None
    return SuffixProposer(matcher)


def with_kept_answers(parts: ExecutorParts, answers: AnswerKeeper | None) -> ExecutorParts:
    """Return the parts of an executor whose copied answers outlive this server. answers: keeps them; None: nothing."""
    copying = parts.text_proposer
    if answers is None or not isinstance(copying, SuffixProposer):
        return parts
    vocab_size = parts.shard.spec.vocab_size
    return evolve(parts, text_proposer=evolve(copying, answers=answers, vocab_size=vocab_size))


def count_most_copied(text_proposer: TextProposer | None, shard: Pipeline, batch_rows: int) -> int:
    """Return the most tokens that one decode step may copy. Recurrent state limits them as it limits a draft."""
    most = 0 if text_proposer is None else min(MOST_COPIED, batch_rows - 1)
    return min(most, shard.states.block - 1) if shard.states.specs else most


def count_most_branch(text_proposer: TextProposer | None, shard: Pipeline) -> int:
    """Return the most tokens that the branch of a copied chain may have; 0: the target verifies chains only."""
    return 0 if text_proposer is None or shard.states.tree_obstacle else MOST_BRANCH
