"""What is settled before weights are read: what is proven, how much there is room for, who the model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adapters.models.checkpoint import Checkpoint
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.row_form import row_dtype
from adapters.models.numerics import Numerics
from adapters.remote.peer import Peer
from engine import startup
from engine.draft import FoundDraft
from engine.fit import Fit
from engine.identity import identity
from engine.kept import Kept
from engine.machine import Placement, chunk_of, prove
from engine.needs import chosen, outgrown
from engine.options import Options
from engine.warm_up import compiled_beside


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
    step: startup.StepHeard,
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
