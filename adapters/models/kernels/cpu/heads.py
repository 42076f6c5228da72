"""Projected heads on a CPU without the compiled library: their bias, their norms and their rotation, by torch."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.cpu.native.rows import PreparedHeads
from adapters.models.kernels.interface import HeadPrep, Rope
from adapters.models.kernels.step_batch import Batch


@define(eq=False)
class PreparedHeadsCache:
    """A cache of head preparations in the form that CPU kernels read, made once for each layer's weights.

    An entry keeps the object that it was made from, so that no other object can take over its identity.
    """

    _found: dict[tuple[int, int], tuple[HeadPrep, PreparedHeads]] = field(init=False, factory=dict)

    def __call__(self, prep: HeadPrep, shape: tuple[int, int, int]) -> PreparedHeads:
        """Return the preparation in float32. shape: query heads, key heads and their size.

        Its weight is what queries and keys are multiplied with, attention's scale of the queries included. Its bias
        has the shape `[H + 2 KV, hd]`.
        """
        queries, kv, head = shape
        found = self._found.get((id(prep), queries))
        if found is None:
            one = torch.ones(head)
            q_norm = one if prep.q_norm is None else prep.q_norm.float()
            k_norm = one if prep.k_norm is None else prep.k_norm.float()
            scaled = q_norm * head**-0.5
            weight = torch.cat((scaled.expand(queries, -1), k_norm.expand(kv, -1)))
            bias = None if prep.bias is None else prep.bias.float().view(queries + 2 * kv, head)
            heads = PreparedHeads(bias, weight, prep.q_norm is not None, prep.eps)
            found = (prep, heads)
            self._found[id(prep), queries] = found
        return found[1]


def rotate_heads(projected: Tensor, heads: PreparedHeads, rope: Rope, batch: Batch, kv: int) -> tuple[Tensor, Tensor]:
    """Prepare projected heads and rotate queries and keys to the positions of their rows.

    Returns queries and keys, float32 `[R, H + KV, hd]`, and values `[R, KV, hd]`. kv: the number of key heads.
    """
    rotated_heads, head = heads.weight.shape
    all_heads = projected.view(batch.bucket, rotated_heads + kv, head)
    if heads.bias is not None:
        all_heads = all_heads.float() + heads.bias
    rotated = all_heads[:, :-kv].float()
    values = all_heads[:, -kv:]
    if heads.normed:
        rotated = torch.rms_norm(rotated, (head,), None, heads.eps)
    rotated = rotated * heads.weight
    cos, sin = batch.plan.gather_angles(rope, batch)
    part = rotated[..., : cos.shape[2]]
    swapped = torch.roll(part, part.shape[2] // 2, 2)
    part.mul_(cos).add_(swapped.mul_(sin))
    return rotated, values
