"""The GGUF types of few bits that products do not multiply packed. They are unpacked on the host while they are loaded.

The `gguf` package unpacks them, which is optional (extra `gguf`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError

HOST_TYPES = frozenset(
    (
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
    )
)


def unpack_few_bits(name: str, blocks: Tensor) -> Tensor:
    """Return the weights of blocks of bytes on the host, `[blocks, size]`: float32 `[blocks, count]`.

    name: of the type. Raises CheckpointError where the package is not installed.
    """
    try:
        from gguf import GGMLQuantizationType  # noqa: PLC0415 - an optional package, which takes half a second
        from gguf.quants import dequantize  # noqa: PLC0415
    except ImportError:
        raise CheckpointError(
            f"weights of type {name} need the package gguf; install it with pip install 'rekindle[gguf]'"
        ) from None
    with np.errstate(all="ignore"):  # what is no number is refused by the caller
        found = dequantize(blocks.numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32)).view(len(blocks), -1)
