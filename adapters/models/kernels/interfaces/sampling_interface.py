"""The operations that pick tokens from rows of logits, with one implementation per kind of device.

`factory.build_sampling` builds them: `cpu/sampling.py` for a host, `cuda/sampling.py` for a GPU. All implementations
give the same bits, so a request draws the same tokens on every device.

Terms that all signatures share:

* `logits` are float32 `[R, V]` on the device of the operations. A row lies in one piece.
* `extremes` are float64 `[R, 3]`: of each row its likeliest token, its smallest and its largest logit. Both logits are
  NaN where any logit of the row is.
* `rows` are the numbers of rows of `logits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from effects.ids import Tokens
from effects.job import Sampling

PENDING = 32  # tokens of an answer that travel with each step, before a GPU counts them in its own memory

TokenMask: TypeAlias = NDArray[np.uint8]  # `[at most V / 8, rounded up]`: one bit for each token, the lowest bit first

# How the token of a row is picked, its position in the sequence, and which tokens may follow (None: all of them).
PickRequest: TypeAlias = tuple[Sampling, int, TokenMask | None]
# Token, lowest and highest logit of a row; and its log-probabilities in the order of `SamplingKernels.weigh_tokens`,
# empty where the request did not ask for them.
PickedRow: TypeAlias = tuple[list[float], list[float]]


class Penalties(Protocol):
    """The biases and penalties of one request, and the tokens that its penalties have seen.

    remembers: whether the adjusted logits depend on the answer so far.
    """

    remembers: bool

    def append(self, tokens: Sequence[int]) -> None:
        """Count tokens that are part of the answer now."""
        ...


class RowPicker(Protocol):
    """Picks the tokens of rows in host memory in a single call of the compiled library."""

    def pick(self, raw: Tensor, used: Tensor, wanted: Sequence[PickRequest]) -> list[PickedRow]:
        """Pick one token for each row.

        raw, used: the model's logits, and these with biases and penalties; the same tensor where there are none.
        Raises ValueError for tensors that the library cannot read, MemoryError where there is no memory.
        """
        ...


class SamplingKernels(Protocol):
    """The operations of one device. The host waits for the device in none of them."""

    def open_picker(self) -> RowPicker | None:
        """Return what picks whole rows in one call; None on a GPU, and where no compiled library serves."""
        ...

    def find_extremes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of each row, int64 `[R]`, and the rows' extremes. The lowest id wins ties."""
        ...

    def draw_tokens(
        self,
        logits: Tensor,
        extremes: Tensor,
        rows: Sequence[int],
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        *,
        tokens: Tensor,
        found: Tensor,
    ) -> None:
        """Draw a token from each of some rows of adjusted logits.

        samplings, positions: one for each of `rows`. extremes: of these logits. The drawn tokens are written to
        `tokens`, int64 `[R]`, and to the first column of `found`, float64 `[R, 3]`.
        """
        ...

    def weigh_tokens(self, logits: Tensor, rows: Sequence[int], tokens: Tensor, count: int) -> Tensor:
        """Return what log-probabilities are computed from: float64 `[len(rows), 2 + 2 count]`.

        tokens: int64 `[R]`, the picked ones. The columns of a row are:
        * The logit of its token, less the highest one.
        * The ids of the `count` likeliest tokens, and then their logits, less the highest one.
        * The sum of the weights of all tokens, where the highest has weight 1.
        """
        ...

    def make_penalties(self, sampling: Sampling, prompt: Tokens, vocab: int, biases: Mapping[int, float]) -> Penalties:
        """Return the penalties of a request that has seen `prompt` (empty without a repetition penalty)."""
        ...

    def apply_penalties(self, logits: Tensor, rows: Sequence[tuple[Penalties | None, Sequence[int]]]) -> Tensor:
        """Return adjusted logits, float32 `[len(rows), V]`; `logits`, which may have more rows, stays as it is.

        rows: of each row the penalties of its request, made by these operations, and the proposals that it presumes.
        """
        ...


def build_penalties(kernels: SamplingKernels, sampling: Sampling, prompt: Tokens, vocab: int) -> Penalties | None:
    """Return the penalties of a request, or None where it has none. prompt: every token before the answer.

    Raises ValueError for a bias on a token that the model does not have.
    """
    biases = dict(sampling.logit_bias)
    for token in biases:
        if not 0 <= token < vocab:
            raise ValueError(f"logit_bias names token {token}; the model's are 0..{vocab - 1}")
    penalised = sampling.repetition_penalty != 1 or bool(sampling.presence_penalty or sampling.frequency_penalty)
    if not biases and not penalised:
        return None
    return kernels.make_penalties(sampling, prompt if sampling.repetition_penalty != 1 else (), vocab, biases)
