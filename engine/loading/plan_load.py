"""What is settled before weights are read: what is proven, how much there is room for, who the model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.row_format import row_dtype
from adapters.models.numerics.probe_result import Numerics
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.peer import Peer
from engine.loading.device_survey import Placement, chunk_of, prove
from engine.loading.identity import identity
from engine.loading.load_draft import FoundDraft
from engine.loading.memory_estimate import chosen, outgrown
from engine.loading.memory_fit import Fit
from engine.loading.warm_up import compiled_beside
from engine.settings import start_progress
from engine.settings.calibration_cache import Kept
from engine.settings.options import Options


def settled(
    options: Options,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    draft: FoundDraft | None,
    *,
    fit: Fit,
    peer: Peer | None,
    kept: Kept,
    step: start_progress.StepHeard,
) -> tuple[Fit, Numerics, tuple[Kernels | None, ...], str]:
    """What is proven, and kernels that keep to it; if less stays packed than was expected, with less room for rows. And
    the model's identity.
    """
    rows, chunk = row_dtype(options.kv_dtype, dtype), chunk_of(options, plan)
    digest = compiled_beside(checkpoint, plan, dtype, rows=rows, fit=fit, chunk=chunk, kept=kept, step=step)
    numerics, kernels = prove(options, checkpoint, dtype, plan, fit.context, kept=kept)
    if outgrown(checkpoint, dtype, plan, numerics.plan):
        how: dict[str, Any] = {"peer": peer, "layouts": checkpoint.layouts, "proven": numerics.plan}
        fit = chosen(options, checkpoint.config, dtype, plan, draft, **how)
        numerics, kernels = prove(options, checkpoint, dtype, plan, fit.context, kept=kept)
    return fit, numerics, kernels, identity(checkpoint, dtype, numerics, options.numerics, rows, digest=digest)
