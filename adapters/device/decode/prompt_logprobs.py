"""The log-probabilities of a prompt's own tokens: a prefill whose logits are read as well."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.device.lane.buckets import bucket_of
from adapters.device.sampling.sampler import logprobs_of
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.step import Segment, Step
from effects.decode import Logprob
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill

LOGIT_ROWS = 64  # rows of a prompt at a time: with a vocabulary of 152,000 their logits take 39 MB


def prefill_with_logprobs(
    shard: Pipeline, buckets: Sequence[int], state: SlotState, effect: RunPrefill
) -> PrefillAdvanced | DeviceFailed:
    """Compute the rows of a prefill and the log-probability of each token after them, as a decode step has them.

    No checkpoint is kept of these rows. The outcome says that they took no time, because the time of a prefill with
    logits must not teach the core what one without them costs.
    """
    logprobs = list[Logprob]()
    most = max(bucket for bucket in buckets if bucket <= LOGIT_ROWS)
    for start in range(effect.start, effect.stop, most):
        stop = min(start + most, effect.stop)
        step = Step((Segment(effect.slot, start, stop - start),), bucket_of(buckets, stop - start))
        forward = shard.forward(step, torch.tensor(state.tokens[start:stop]))
        logits = shard.logits(step, forward.hidden)[: stop - start]
        if not torch.isfinite(logits).all():
            return DeviceFailed("broken", f"slot {effect.slot}: the logits of rows {start}..{stop} are not finite")
        logprobs += logprobs_of(logits, state.tokens[start + 1 : stop + 1], effect.logprobs)
        shard.commit(step, [stop - start])
        state.mark_computed(stop)
    return PrefillAdvanced(effect.stop, 0, tuple(logprobs))
