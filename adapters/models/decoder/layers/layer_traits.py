"""The parts that layers of a few families have in addition: windows, more norms, keys of another layer."""

from __future__ import annotations

from attrs import frozen

from adapters.models.kernels.activations import SILU


@frozen
class LayerTraits:
    """The traits of one layer; the defaults are those of most families.

    window: of the keys up to and including its own, a row sees only the last `window`; 0: all. cap: scores are capped
    with it (`AttentionRule`); 0: they are not. sinks: each query head has a score that only joins the softmax's sum.
    query_scale: scores are scaled with this times hd ** -0.5; other than 1 only where queries are normed.
    out_bias: the projection behind attention has a bias. norms_all_heads: the norm of queries goes over the numbers of
    all heads together, and so does that of keys.
    gates: numbers of each query head's gate, 1 or hd; what is attended is multiplied with their softplus. 0: there are
    none.
    latent: rows are keys and values at once, as in `AttentionRule`.
    v_norm: values are normed. shares_projection: values are what keys are before these are normed and rotated.
    source: the layer whose keys and values this one reads, because it has none of its own.
    post_norms: what attention and the feed-forward return is normed as well. The norm before the feed-forward then is
    `pre_feedforward_layernorm`. activation: the function of what gates the feed-forward (`activations.py`).
    """

    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    out_bias: bool = False
    norms_all_heads: bool = False
    gates: int = 0
    latent: int = 0
    query_scale: float = 1.0
    v_norm: bool = False
    shares_projection: bool = False
    source: int | None = None
    post_norms: bool = False
    activation: str = SILU

    @property
    def keeps_rows(self) -> bool:
        """Return whether the layer keeps a row for every token of a sequence."""
        return not self.window and self.source is None

    @property
    def keeps_window(self) -> bool:
        """Return whether the layer keeps only the rows of its window."""
        return self.window > 0 and self.source is None


USUAL = LayerTraits()
