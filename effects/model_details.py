"""The properties of a loaded model that clients see, in /v1/models and in /props."""

from __future__ import annotations

from typing import TypedDict

from attrs import frozen


@frozen
class ModelDetails:
    """The properties of a loaded model, under the names that JSON has.

    n_ctx_train: positions that it was made for. dtype: of hidden states. kv_dtype: of cached keys and values. size:
    bytes of weights, without experts in host memory. packed: how weights are packed in the checkpoint, if they are.
    bits_per_weight: in the checkpoint. bits_in_memory: as they are computed with. quantize_error: relative root
    mean square error of weights that the server itself has rounded; None: it has rounded none.
    """

    n_ctx_train: int
    dtype: str
    kv_dtype: str
    size: int
    packed: tuple[str, ...]
    bits_per_weight: float
    bits_in_memory: float
    quantize_error: float | None


class ProbeCounts(TypedDict):
    """The work of a numerics probe. products: shapes that were proven."""

    seconds: float
    checks: int
    spans: int
    products: int


_Class = TypedDict("_Class", {"class": str})  # a word of Python's that no field can have


class NumericsReport(_Class):
    """The outcome of the numerics probe as JSON has it. `Numerics` explains its fields; `class` is `numerics_class`."""

    shapes: str
    buckets: list[int]
    block_size: int
    chunk: int
    kernels: str
    threads: int
    probe: ProbeCounts
    products: list[str]
    failures: list[str]
