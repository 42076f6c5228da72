"""Projected heads on a CPU: their bias, their norms and their rotation, by the compiled library or by torch."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.cpu.native.rows import NativeRows, PreparedHeads, count_value_heads
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.step_batch import Batch


@define(eq=False)
class PreparedHeadsCache:
    """A cache of head preparations in the form that CPU kernels read, made once for each layer's weights.

    An entry keeps the object that it was made from, so that no other object can take over its identity.
    """

    _found: dict[tuple[int, int, int], tuple[HeadPrep, PreparedHeads]] = field(init=False, factory=dict)

    def __call__(self, prep: HeadPrep, shape: tuple[int, int, int]) -> PreparedHeads:
        """Return the preparation in float32. shape: query heads, key heads and their size.

        Its weight is what queries and keys are multiplied with, attention's scale of the queries included. Its bias
        has the shape `[H + 2 KV, hd]`.
        """
        queries, kv, head = shape
        found = self._found.get((id(prep), queries, kv))
        if found is None:
            one = torch.ones(head)
            q_norm = one if prep.q_norm is None else prep.q_norm.float()
            k_norm = one if prep.k_norm is None else prep.k_norm.float()
            scaled = q_norm * head**-0.5
            weight = torch.cat((scaled.expand(queries, -1), k_norm.expand(kv, -1)))
            bias = None if prep.bias is None else prep.bias.float().view(queries + 2 * kv, head)
            heads = PreparedHeads(bias, weight, prep.q_norm is not None, prep.eps, prep.v_norm)
            found = (prep, heads)
            self._found[id(prep), queries, kv] = found
        return found[1]


def rotate_heads(projected: Tensor, heads: PreparedHeads, rope: Rope, batch: Batch, kv: int) -> tuple[Tensor, Tensor]:
    """Prepare projected heads and rotate queries and keys to the positions of their rows.

    Returns queries and keys, float32 `[R, H + KV, hd]`, and values `[R, kv, hd]`. kv: the number of heads of values.
    """
    rotated_heads, head = heads.weight.shape
    all_heads = projected.view(batch.bucket, rotated_heads + kv, head)
    if heads.bias is not None:
        all_heads = all_heads.float() + heads.bias
    rotated = all_heads[:, :rotated_heads].float()
    values = all_heads[:, rotated_heads:]
    if heads.normed:
        rotated = torch.rms_norm(rotated, (head,), None, heads.eps)
    if heads.norms_values:
        values = torch.rms_norm(values.float(), (head,), None, heads.eps)
    rotated = rotated * heads.weight
    cos, sin = batch.plan.gather_angles(rope, batch)
    part = rotated[..., : cos.shape[2]]
    swapped = torch.roll(part, part.shape[2] // 2, 2)
    part.mul_(cos).add_(swapped.mul_(sin))
    return rotated, values


@define(eq=False)
class CpuHeads:
    """The preparation of heads for one shard, as `Kernels` has it. rows: of the compiled library, if there is one."""

    rows: NativeRows | None
    prepared: PreparedHeadsCache = field(init=False, factory=PreparedHeadsCache)

    def rotate_store(
        self, qkv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        kv = k_cache.shape[1]
        head = format_of(k_cache).head_size(k_cache.shape[3])
        values = count_value_heads(k_cache, v_cache)
        queries = qkv.shape[1] // head - kv - values
        if self.rows is not None:
            q = self._prepare_natively(self.rows, qkv, prep, rope, batch, k_cache, v_cache)
            return q.view(batch.bucket, kv, queries // kv, head)
        rotated, own = rotate_heads(qkv, self.prepared(prep, (queries, kv, head)), rope, batch, values)
        batch.plan.write_caches(rotated[:, queries:], own, k_cache, v_cache)
        asking = format_of(k_cache).rotate(rotated[:, :queries])
        return asking.contiguous().view(batch.bucket, kv, queries // kv, head)

    def rotate_queries(self, q: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor) -> Tensor:
        kv = k_cache.shape[1]
        head = format_of(k_cache).head_size(k_cache.shape[3])
        queries = q.shape[1] // head
        if self.rows is not None:
            none = k_cache.narrow(1, 0, 0)
            rotated = self._prepare_natively(self.rows, q, prep, rope, batch, none, none)
        else:
            turned, _ = rotate_heads(q, self.prepared(prep, (queries, 0, head)), rope, batch, 0)
            rotated = format_of(k_cache).rotate(turned)
        return rotated.view(batch.bucket, kv, queries // kv, head)

    def store(self, kv: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        if self.rows is not None:
            self._prepare_natively(self.rows, kv, prep, rope, batch, k_cache, v_cache)
            return
        heads = k_cache.shape[1]
        head = format_of(k_cache).head_size(k_cache.shape[3])
        values_of = count_value_heads(k_cache, v_cache)
        keys, values = rotate_heads(kv, self.prepared(prep, (0, heads, head)), rope, batch, values_of)
        batch.plan.write_caches(keys, values, k_cache, v_cache)

    def _prepare_natively(
        self, own: NativeRows, x: Tensor, prep: HeadPrep, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        slots, kv, capacity, width = k_cache.shape
        head = format_of(k_cache).head_size(width)
        batch.plan.check_caches(slots, min(capacity, len(rope.cos)))
        queries = x.shape[1] // head - kv - count_value_heads(k_cache, v_cache)
        heads = self.prepared(prep, (queries, kv, head))
        return own.prepare_heads(x, heads, rope, (batch.slots, batch.positions), k_cache, v_cache)
