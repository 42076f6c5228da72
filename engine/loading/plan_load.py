"""The decisions of a start before weights are read: a plan, and then what is proven of that plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from attrs import frozen

from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.kernels.interfaces.product_list import ProductPlan
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from engine.loading.drafts.find_draft import FoundDraft
from engine.loading.identity import compute_identity
from engine.loading.memory.device_survey import Placement, choose_chunk
from engine.loading.memory.memory_fit import Fit
from engine.loading.memory_estimate import choose_fit, outgrows_estimate
from engine.loading.prove_numerics import ProvenKernels, prove
from engine.loading.warm_up import compile_kernels, digest_beside
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.options import Options
from engine.settings.output import start_progress


@frozen(eq=False)
class LoadPlan:
    """The decisions of a start before anything is proven: the model, its dtype, where its layers go, and its draft.

    placements: of the shards, in the order of their layers. remote_draft: the process that has the draft, if another
    one has it.
    """

    options: Options
    checkpoint: Checkpoint
    dtype: torch.dtype
    placements: Sequence[Placement]
    draft: FoundDraft | None
    remote_draft: Peer | None = None

    def choose_fit(self, proven: ProductPlan | None = None) -> Fit:
        """Return the slots and the context that there is memory for. proven: which products keep weights packed."""
        return choose_fit(
            self.options,
            self.checkpoint.config,
            self.dtype,
            self.placements,
            self.draft,
            peer=self.remote_draft,
            layouts=self.checkpoint.layouts,
            proven=proven,
        )

    def prove(self, context: int, kept: CalibrationCache) -> tuple[Numerics, ProvenKernels]:
        """Prove numerics for a context of this many tokens, and return them with the kernels of each shard."""
        options = self.options
        return prove(
            options.weights, options.runtime, self.checkpoint, self.dtype, self.placements, context=context, kept=kept
        )


@frozen(eq=False)
class ProvenPlan:
    """The facts that are known before weights are read: room, numerics, the kernels of each shard, the identity."""

    fit: Fit
    numerics: Numerics
    kernels: ProvenKernels
    identity: str


def prove_plan(plan: LoadPlan, fit: Fit, *, kept: CalibrationCache, on_step: start_progress.StepListener) -> ProvenPlan:
    """Prove numerics on every device, and compute the identity of the model.

    fit: as it was estimated. If fewer weights stay packed than the estimate expected, there is less room for rows: then
    the fit is chosen anew, and numerics are proven for it.
    """
    checkpoint = plan.checkpoint
    placements = plan.placements
    options = plan.options
    rows = read_row_types(options.weights.kv_dtype, plan.dtype)
    chunk = choose_chunk(options.runtime, placements, checkpoint.config)
    compiling = partial(
        compile_kernels,
        checkpoint,
        placements,
        plan.dtype,
        rows=rows,
        fit=fit,
        chunk=chunk,
        kept=kept,
        on_step=on_step,
    )
    digest = digest_beside(checkpoint, compiling)
    numerics, kernels = plan.prove(fit.context, kept)
    if outgrows_estimate(checkpoint, plan.dtype, placements, numerics.plan):
        fit = plan.choose_fit(numerics.plan)
        numerics, kernels = plan.prove(fit.context, kept)
    identity = compute_identity(checkpoint, plan.dtype, numerics, options.runtime.numerics, rows, digest=digest)
    return ProvenPlan(fit, numerics, kernels, identity)
