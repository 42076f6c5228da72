"""The indices of the layers of a shard in the caches of their rows or states, and the rotary tables that they share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import define, field, frozen

from adapters.models.decoder.cache.kv_cache import KvCache, PagedKvCache
from adapters.models.decoder.cache.recurrent_cache import RecurrentCache
from adapters.models.decoder.cache.window_rows import WindowRows, WindowShape
from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.layers.tree_attention import TreeAttention, TreeGroups
from adapters.models.decoder.shard import ShardPlacement, ShardSpec
from adapters.models.decoder.shard_crossing import CrossingPort
from adapters.models.kernels.formats.row_format import RowLayout, row_types
from adapters.models.kernels.interfaces.layer_interface import Kernels, Rope


@frozen
class LayerIndex:
    """The layers of a shard by what they keep of a sequence: all rows, the rows of a window, a recurrent state, or
    nothing, because they read what another layer keeps.

    borrowed: layers of earlier shards whose rows are kept here as well (`Crossing`). They are among `kept` and
    `windowed`. indices: the number of each layer among those of its kind.
    """

    config: DenseConfig
    layers: range
    borrowed: tuple[int, ...] = field(init=False)
    kept: tuple[int, ...] = field(init=False)
    windowed: tuple[int, ...] = field(init=False)
    recurrent: tuple[int, ...] = field(init=False)
    indices: dict[int, int] = field(init=False)

    @borrowed.default
    def _list_borrowed(self) -> tuple[int, ...]:
        return self.config.list_borrowed(self.layers.start)

    @kept.default
    def _list_kept(self) -> tuple[int, ...]:
        return tuple(layer for layer in (*self.borrowed, *self.layers) if self.config.keeps_rows(layer))

    @windowed.default
    def _list_windowed(self) -> tuple[int, ...]:
        return self.config.list_windowed(self.layers)

    @recurrent.default
    def _list_recurrent(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.layers if self.config.recurrent(layer))

    @indices.default
    def _number(self) -> dict[int, int]:
        kinds = (self.kept, self.windowed, self.recurrent)
        return {layer: index for kind in kinds for index, layer in enumerate(kind)}

    def find_owner(self, layer: int) -> int:
        """Return the layer that keeps the rows which this one reads. Raises ValueError if they are not here."""
        source = self.config.shape_of(layer).traits.source
        owner = layer if source is None else source
        if owner not in self.indices:
            raise ValueError(f"layers {self.layers.start}..{self.layers.stop - 1} lack rows of layer {owner}")
        return owner


@define(eq=False)
class RopeTables:
    """The rotary tables of a shard's layers: layers that rotate alike share one."""

    config: DenseConfig
    capacity: int
    device: torch.device
    _tables: dict[Rotary, Rope] = field(init=False, factory=dict)

    def of_layer(self, layer: int) -> Rope:
        rotary = self.config.shape_of(layer).rotary
        if rotary not in self._tables:
            self._tables[rotary] = rotary.tables(self.capacity, self.device)
        return self._tables[rotary]

    @property
    def nbytes(self) -> int:
        return sum(table.cos.nbytes + table.sin.nbytes for table in tuple(self._tables.values()))


def build_rows(
    config: DenseConfig, layer_index: LayerIndex, spec: ShardSpec, placement: ShardPlacement, *, paged: bool
) -> KvCache:
    """Return memory for the rows of the layers that keep all of them. ValueError if their rows are not alike."""
    types = row_types(placement.dtype if placement.rows is None else placement.rows)
    # A shard without such layers describes its rows as the others do.
    kept = layer_index.kept or LayerIndex(config, range(config.num_layers)).kept or (layer_index.layers.start,)
    heads, size = find_row_shape(config, kept)
    layout = RowLayout(types, size, latent=bool(config.shape_of(kept[0]).traits.latent))
    types.check_heads(size, latent=layout.latent)
    return (PagedKvCache if paged and placement.pages else KvCache)(
        [f"layers.{layer}" for layer in layer_index.kept],
        (spec.slots, heads, spec.capacity, layout.width),
        dtype=layout.dtype,
        device=spec.device,
        pages=placement.pages,
        layout=layout,
    )


def build_states(
    config: DenseConfig, layer_index: LayerIndex, spec: ShardSpec, placement: ShardPlacement, kernels: Kernels
) -> RecurrentCache | WindowRows:
    """Return memory for the positional state of the layers that have one. ValueError for states of several kinds."""
    names = [f"layers.{layer}" for layer in layer_index.windowed]
    if not names:
        return RecurrentCache(
            [f"layers.{layer}" for layer in layer_index.recurrent],
            config.delta,
            kernels.delta,
            slots=spec.slots,
            checkpoint_count=placement.state_checkpoints,
            dtype=spec.dtype,
            device=spec.device,
        )
    windows = {config.shape_of(layer).traits.window for layer in layer_index.windowed}
    if layer_index.recurrent or len(windows) > 1:
        raise ValueError(
            f"windows of {sorted(windows)} rows and {len(layer_index.recurrent)} recurrent layers in one model"
        )
    return WindowRows(
        names,
        WindowShape(
            *find_row_shape(config, layer_index.windowed),
            windows.pop(),
            find_tree_obstacle(config, layer_index.layers),
            tuple(layer_index.indices[layer] for layer in config.list_lasting(layer_index.layers)),
        ),
        slots=spec.slots,
        checkpoint_count=placement.state_checkpoints,
        rows=(spec.capacity, spec.buckets[-1]),
        dtype=spec.dtype,
        device=spec.device,
        paged=kernels.is_paged,
    )


def find_tree_obstacle(config: DenseConfig, layers: range) -> str:
    """Return why steps of a shard of these layers cannot have trees; empty if they can.

    Rows that cross a cut of the model have one place for each position, and a tree has several rows at a position.
    """
    shapes = [config.shape_of(layer) for layer in range(config.num_layers)]
    if len(layers) < len(shapes) and any(shape.traits.source is not None for shape in shapes):
        return "layers of one shard read rows of layers of another one"
    kinds = {(shape.traits.window > 0, shape.rotary) for shape in shapes}
    return "layers of one kind rotate differently" if len(kinds) > 2 else ""


def build_trees(
    kernels: Kernels,
    bucket: int,
    layer_index: LayerIndex,
    ropes: RopeTables,
    find_cache: Callable[[int], tuple[KvCache, int]],
) -> TreeGroups:
    """Return what trees of proposals need in steps of one bucket. find_cache: of a layer that keeps rows."""
    kinds = [layers for layers in (layer_index.kept, layer_index.windowed) if layers]
    groups = [TreeAttention(kernels, bucket, ropes.of_layer(first), find_cache(first)[0]) for first, *_ in kinds]
    placed = {
        layer: (group, find_cache(layer)[1]) for layers, group in zip(kinds, groups, strict=True) for layer in layers
    }
    return TreeGroups(tuple(groups), placed)


def build_crossing_port(
    config: DenseConfig, layers: range, placement: ShardPlacement, find_cache: Callable[[int], tuple[KvCache, int]]
) -> CrossingPort:
    """Return what takes apart what a shard of these layers is given. find_cache: as in `CrossingPort`."""
    rows = placement.dtype if placement.rows is None else placement.rows
    given, left = (config.find_crossing(cut, placement.dtype, rows) for cut in (layers.start, layers.stop))
    return CrossingPort(given, left, find_cache)


def find_row_shape(config: DenseConfig, layers: tuple[int, ...]) -> tuple[int, int]:
    """Return the key heads and the size of a head that these layers share. ValueError if they differ."""
    shapes = {(shape.num_kv_heads, shape.head_dim) for shape in map(config.shape_of, layers)}
    if len(shapes) > 1:
        raise ValueError(f"rows of several shapes: {sorted(shapes)}")
    return shapes.pop()
