"""How the words of packed weights lie on a GPU, as `triton/packed_numbers.py` reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.kernels.formats.packed_formats import block_columns

SIDE = 8  # rows that lie side by side
_PAIRED = {"uint4", "int4"}
# Of the four pairs of a word of E2M1: the places of the three bits of size, ascending, and of the sign. These are those
# of the number in the lower half. The other one has them 16 bits further, in turn.
_E2M1_PLACES = ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3))


def arrange_words(steps: Tensor, layout: StepLayout) -> Tensor:
    """Arrange steps `[rows, K]` as int32 words `[rows / 8, K / block, 128]`, filled up with zeros.

    Of each of eight rows, each of four lanes has four words. Word c of lane t takes the block's columns from c *
    block / 4 on, and of each 16 of them, in ascending bits, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Of numbers that
    are computed in pairs, the first of each pair is in the lower half of a word, and the second one in the upper half.
    `_E2M1_PLACES` says where those of E2M1 are.
    """
    block = block_columns(layout)
    (rows, columns) = steps.shape
    steps = pad(steps.view(torch.uint8), (0, -columns % block, 0, -rows % SIDE))
    if layout.steps == "int8":
        steps = steps ^ 128
    each = block // 16
    lanes = steps.view(-1, SIDE, steps.shape[1] // block, 4, each // 4, 2, 4, 2)  # ..., word, 16, half, lane, pair
    lanes = lanes.permute(0, 2, 1, 6, 3, 4, 5, 7).reshape(len(lanes), -1, 128, each)
    if layout.steps == "e2m1":
        pairs = lanes.view(*lanes.shape[:-1], 4, 2).long()
        words = torch.zeros_like(pairs[..., 0, 0])
        for pair, places in enumerate(_E2M1_PLACES):
            for half in range(2):
                for bit, place in enumerate(places):
                    words |= (pairs[..., pair, half] >> bit & 1) << (place + 16 * half) % 32
        return (words - (words >> 31 << 32)).int()
    if layout.steps in _PAIRED:
        pairs = lanes.view(*lanes.shape[:-1], 2, 2, 2)  # bytes of each half of a word, numbers of a byte, halves
        lanes = (pairs[..., 0, :] | pairs[..., 1, :] << 4).transpose(-2, -1).flatten(-2)
    elif each == 8:
        lanes = lanes[..., 0::2] | lanes[..., 1::2] << 4
    return lanes.contiguous().view(torch.int32).squeeze(-1)
