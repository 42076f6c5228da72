"""A prompt's own log-probabilities: chunks of a prefill whose logits are read, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.device.lane.buckets import bucket_of
from adapters.device.sampling.sampler import logprobs_of
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.shard import Shard
from adapters.models.kernels.step import Segment, Step
from effects.decode import Logprob
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill

LOGIT_ROWS = 64  # of a prompt at a time: of a vocabulary of 152,000 they are 39 MB


def told(shard: Shard, buckets: Sequence[int], state: SlotState, effect: RunPrefill) -> PrefillAdvanced | DeviceFailed:
    """As a decode step has them, of no more rows at a time than one could have.

    Nobody goes on from these rows, so no checkpoint is kept of them, and no price is known from how long they took.
    """
    logprobs, most = list[Logprob](), max(bucket for bucket in buckets if bucket <= LOGIT_ROWS)
    for start in range(effect.start, effect.stop, most):
        stop = min(start + most, effect.stop)
        step = Step((Segment(effect.slot, start, stop - start),), bucket_of(buckets, stop - start))
        forward = shard.forward(step, torch.tensor(state.tokens[start:stop]))
        logits = shard.logits(step, forward.hidden)[: stop - start]
        if not torch.isfinite(logits).all():
            return DeviceFailed("broken", f"slot {effect.slot}: the logits of rows {start}..{stop} are not finite")
        logprobs += logprobs_of(logits, state.tokens[start + 1 : stop + 1], effect.logprobs)
        shard.commit(step, [stop - start])
        state.advance(stop)
    return PrefillAdvanced(effect.stop, 0, tuple(logprobs))
