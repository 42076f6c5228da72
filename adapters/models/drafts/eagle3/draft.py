"""EAGLE-3: a draft of one layer that predicts one token after the other, from three layers of its target.

The state of a row that the target has computed is made from the outputs of three layers of the target:

    g = fc(low | middle | high)

A row of the draft combines the embedding of a token with the state of the row before it. Both are normed and lie side
by side, so queries, keys and values are projected from 2 D numbers. The residual stream begins with the state alone:

    x = g + attention(norm(embedding) | norm(g));  x = x + mlp(norm(x));  logits = head(norm(x))

The next proposal continues from x, before the norm. Some drafts begin the residual stream with the normed state, or
continue from behind the norm (`Eagle3Norms`). `chained_draft.py` tells how rows and states are kept.

The head of a published draft predicts a part of the tokens only: 32,000 of them, as a rule. The logits of all others
are -inf, so proposals are picked and verified as those of any other draft.

The first token of a sequence has no row in training, because no state comes before it. Its row is computed here as all
others are, and proposals do not see it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.chained_batch import ChainedBatch
from adapters.models.drafts.chained_draft import ChainedDraft, EnteredLayer
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.drafts.eagle3.weights import LoadedEagle3, load_eagle3


class Eagle3Draft(ChainedDraft[Eagle3Config, LoadedEagle3]):
    """An EAGLE-3 draft. See `CachedDraft` for the methods."""

    @property
    def _eps(self) -> float:
        return self._config.rms_norm_eps

    def _count_given(self, *, projected: bool) -> int:
        config = self._config
        return config.hidden_size if projected else len(config.aux_layers) * config.target_hidden_size

    def _compute_states(self, loaded: LoadedEagle3, given: Tensor, *, projected: bool) -> Tensor:
        return given if projected else loaded.fusion.run(self._kernels, given)

    def _enter_layer(self, loaded: LoadedEagle3, batch: ChainedBatch) -> EnteredLayer:
        table = self._head.embedding if loaded.embedding is None else loaded.embedding
        embedded = self._embed_tokens(table, batch, loaded.layer.decoder.frame.input_norm)
        states = self._hidden.index_select(0, batch.sources)
        normed = self._kernels.add_norm(states, None, loaded.hidden_norm, self._eps)
        residual = normed if self._config.norms.before_residual else states
        return EnteredLayer(residual, torch.cat((embedded, normed), 1))

    def _choose_state(self, residual: Tensor, normed: Tensor) -> Tensor:
        return normed if self._config.norms.output else residual

    def _write_logits(self, loaded: LoadedEagle3, normed: Tensor, logits: Tensor) -> None:
        found = self._kernels.linear(normed, self._head.packed if loaded.head is None else loaded.head)
        if loaded.tokens is None:
            logits.copy_(found)
        else:
            logits.index_copy_(1, loaded.tokens, found.float())

    def _find_first(self, request: BlockRequest) -> int:
        return max(request.first, 1)

    @property
    def _tap_width(self) -> int:
        return self._config.target_hidden_size

    def _check_head(self, head: TargetHead) -> None:
        """Check the target's embedding, which a draft of another width does not use."""
        if self._config.hidden_size == self._config.target_hidden_size:
            super()._check_head(head)

    def _load_weights(self, read: WeightReader, weights: DraftWeights, head: TargetHead) -> LoadedEagle3:
        return load_eagle3(read, weights, self._kernels, self._config, head)
