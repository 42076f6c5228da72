"""Decoders whose layers are of several kinds: with windows or without, with heads and rotary embedding of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_size
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.layers.layer_traits import LayerTraits
from adapters.models.decoder.shard_crossing import Crossing
from adapters.models.kernels.formats.row_format import Rows

PROBED_LAYERS = 3  # of a small model: a layer, one that reads its rows, and one behind them
FULL = "full_attention"
SLIDING = "sliding_attention"


@frozen
class LayerKind:
    """The sizes and traits of one kind of layers. intermediate_size: of the dense feed-forward."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rotary: Rotary
    traits: LayerTraits


@frozen
class LayeredConfig(DenseConfig):
    """A decoder with layers of several kinds.

    kinds: the kind of every layer. kind: the one that this object describes, if it is the shape of one layer.
    num_heads and its neighbours are those of that layer, or of the first one that keeps rows.
    """

    kinds: tuple[LayerKind, ...] = field(kw_only=True)
    kind: LayerKind | None = field(kw_only=True, default=None)

    @property
    def rotary(self) -> Rotary:
        assert self.kind is not None
        return self.kind.rotary

    @property
    def traits(self) -> LayerTraits:
        assert self.kind is not None
        return self.kind.traits

    def list_borrowed(self, start: int) -> tuple[int, ...]:
        sources = {kind.traits.source for kind in self.kinds[start:]}
        return tuple(sorted(source for source in sources if source is not None and source < start))

    def find_crossing(self, cut: int, dtype: torch.dtype, rows: Rows) -> Crossing:
        sizes = dict[int, int]()
        for layer in self.list_borrowed(cut):
            kept = rows if self.keeps_rows(layer) else dtype  # rows of windows stay in the dtype of the computation
            sizes[layer] = self.shape_of(layer).row_bytes(kept) // dtype.itemsize
        return Crossing(self.hidden_size, rows=tuple(sizes.items()))

    def shape_of(self, layer: int) -> LayeredConfig:
        kind = self.kinds[layer]
        return evolve(
            self,
            kind=kind,
            num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            intermediate_size=kind.intermediate_size,
        )

    def list_probed_layers(self) -> Sequence[tuple[DenseConfig, range]]:
        """Return one layer of each kind. A layer that reads the rows of another one comes with that other one."""
        found: dict[LayerKind, tuple[DenseConfig, range]] = {}
        for kind in self.kinds:
            source = kind.traits.source
            before = kind if source is None else self.kinds[source]
            small = self._in_probe(kind)
            model = self._small(num_layers=PROBED_LAYERS, kinds=(before, small, small))
            found.setdefault(small, (model, range(1 if source is None else 2)))
        return tuple(found.values())

    @staticmethod
    def _in_probe(kind: LayerKind) -> LayerKind:
        """Return the kind as it is in a small model, where layer 0 is the one whose rows are read."""
        return kind if kind.traits.source is None else evolve(kind, traits=evolve(kind.traits, source=0))


def read_layer_types(raw: Mapping[str, Any], interval: int | None = None) -> tuple[str, ...]:
    """Return FULL or SLIDING for each layer. Raises CheckpointError.

    interval: if config.json has no `layer_types`, every layer of this number is FULL.
    """
    count = read_size(raw, "num_hidden_layers")
    found = raw.get("layer_types")
    if found is None and interval is not None:
        return tuple(SLIDING if (layer + 1) % interval else FULL for layer in range(count))
    if not isinstance(found, list) or len(found) != count or any(kind not in (FULL, SLIDING) for kind in found):
        raise CheckpointError(
            f"config.json: layer_types is not a list of {count} kinds of layers; accepted: {FULL!r}, {SLIDING!r}"
        )
    if FULL not in found:
        raise CheckpointError(f"config.json: no layer of layer_types is {FULL!r}; at least one must be")
    return tuple(found)


def find_rope_settings(raw: Mapping[str, Any], kind: str, legacy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of one kind of layers, as `parse_rope` reads them. Raises CheckpointError.

    transformers 5 writes them by kind under `rope_parameters`. legacy: where they are if it is not there.
    """
    by_kind = raw.get("rope_parameters")
    if isinstance(by_kind, Mapping) and kind in by_kind:
        found = by_kind[kind]
        if not isinstance(found, Mapping):
            raise CheckpointError(f"config.json: rope_parameters.{kind} is not an object")
        return {"rope_parameters": found, "max_position_embeddings": raw.get("max_position_embeddings")}
    return {name: legacy[name] for name in ("rope_theta", "rope_scaling") if legacy.get(name) is not None}
