"""MTP: a model's own prediction head as a draft, which predicts one token after the other.

A row of the head combines the embedding of a token with the hidden state of the row before it:

    x = fc(norm(embedding) | norm(hidden))

For rows that the target has computed, `hidden` is the target's last hidden state, in most families after the final norm
(`HeadInputs`). One attention layer runs over such rows, then a norm, and the target's own output head predicts the
token that follows. The next proposal continues from the state behind the norm. `chained_draft.py` tells how rows and
states are kept. If the target's layers keep compressed rows, the layer of the head keeps such rows as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.chained_batch import ChainedBatch
from adapters.models.drafts.chained_draft import ChainedDraft, EnteredLayer
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.drafts.mtp.checkpoint import HeadConfig
from adapters.models.drafts.mtp.weights import LoadedHead, load_head


class MtpDraft(ChainedDraft[HeadConfig, LoadedHead]):
    """A prediction head as a draft. See `CachedDraft` for the methods."""

    @property
    def keeps_latents(self) -> bool:
        return self._config.layer.latent is not None

    @property
    def _eps(self) -> float:
        return self._config.layer.rms_norm_eps

    def _count_given(self, *, projected: bool) -> int:  # noqa: ARG002 - both are the target's last hidden state
        return self._config.hidden_size

    def _compute_states(self, loaded: LoadedHead, given: Tensor, *, projected: bool) -> Tensor:  # noqa: ARG002
        if not self._config.inputs.is_normed:
            return given
        return self._kernels.add_norm(given, None, self._head.norm, self._eps)

    def _enter_layer(self, loaded: LoadedHead, batch: ChainedBatch) -> EnteredLayer:
        kernels = self._kernels
        embedded = self._embed_tokens(self._head.embedding, batch, loaded.embedding_norm)
        states = self._hidden.index_select(0, batch.sources)
        before = kernels.add_norm(states, None, loaded.hidden_norm, self._eps)
        x = kernels.linear(torch.cat((embedded, before), 1), loaded.fc)
        return EnteredLayer(x, kernels.add_norm(x, None, loaded.layer.decoder.frame.input_norm, self._eps))

    def _choose_state(self, residual: Tensor, normed: Tensor) -> Tensor:  # noqa: ARG002
        return normed

    def _write_logits(self, loaded: LoadedHead, normed: Tensor, logits: Tensor) -> None:  # noqa: ARG002
        logits.copy_(self._kernels.linear(normed, self._head.packed))

    def _load_weights(self, read: WeightReader, weights: DraftWeights, head: TargetHead) -> LoadedHead:  # noqa: ARG002
        return load_head(read, self._kernels, self._config)
