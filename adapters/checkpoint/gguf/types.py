"""The types of tensors in GGUF files: their numbers and names, and the size of a block of each type."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Packing:
    """A packed type: `count` numbers of a row are stored in a block of `size` bytes."""

    name: str
    count: int
    size: int


PACKINGS: Mapping[int, Packing] = {
    0: Packing("F32", 1, 4),
    1: Packing("F16", 1, 2),
    30: Packing("BF16", 1, 2),
    8: Packing("Q8_0", 32, 34),
    2: Packing("Q4_0", 32, 18),
    12: Packing("Q4_K", 256, 144),
    13: Packing("Q5_K", 256, 176),
    14: Packing("Q6_K", 256, 210),
    20: Packing("IQ4_NL", 32, 18),
    23: Packing("IQ4_XS", 256, 136),
    3: Packing("Q4_1", 32, 20),
    6: Packing("Q5_0", 32, 22),
    7: Packing("Q5_1", 32, 24),
    10: Packing("Q2_K", 256, 84),
    11: Packing("Q3_K", 256, 110),
    16: Packing("IQ2_XXS", 256, 66),
    17: Packing("IQ2_XS", 256, 74),
    18: Packing("IQ3_XXS", 256, 98),
    19: Packing("IQ1_S", 256, 50),
    21: Packing("IQ3_S", 256, 110),
    22: Packing("IQ2_S", 256, 82),
    29: Packing("IQ1_M", 256, 56),
    39: Packing("MXFP4", 32, 17),
}
ACCEPTED = ", ".join(packing.name for packing in PACKINGS.values())

REFUSED: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""Types that are not supported. An error message names them."""

INTEGERS: Mapping[int, Packing] = {27: Packing("I64", 1, 8)}
"""Types of tensors that are no weights. Only readers that ask for them accept them."""
