"""Kernels compiled for devices that are not there: what the launching code would launch on them, and what it takes.

Launches are withheld, so tensors lie on the processor and nothing is computed. Tiles are chosen as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import define, field, frozen
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from adapters.checkpoint.packed_matrix import MXFP4, StackedWeight, StepLayout
from adapters.models.kernels import triton_launch
from adapters.models.kernels.activations import CLAMPED, GELU
from adapters.models.kernels.cuda.device_traits import DeviceTraits
from adapters.models.kernels.cuda.draw import draw_tokens, find_extremes
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.penalties import GpuPenalties, apply_penalties
from adapters.models.kernels.cuda_capability import CudaCapability
from adapters.models.kernels.formats.row_format import RowLayout, Rows, row_types
from adapters.models.kernels.interfaces.attention_rule import AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.delta_interface import DeltaShape, DeltaWeights, LayerStates
from adapters.models.kernels.interfaces.experts_interface import (
    BiasedExpertsShape,
    Experts,
    ExpertsShape,
    GatedWeights,
    SigmoidExpertsShape,
)
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.interfaces.row_kernels import NormedRows, add_delta
from adapters.models.kernels.interfaces.sampling_interface import PENDING
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch, BlockBatch, StateBatch
from adapters.models.numerics.synthetic import random_matrix
from effects.ids import PAGE
from effects.job import Sampling

CPU = torch.device("cpu")
# The shared memory of a program, as NVIDIA's programming guide gives it for each compute capability.
TARGETS = {
    "sm_80": DeviceTraits(CudaCapability(8, 0), 108, 163 << 10),
    "sm_86": DeviceTraits(CudaCapability(8, 6), 82, 99 << 10),
    "sm_89": DeviceTraits(CudaCapability(8, 9), 128, 99 << 10),
    "sm_90": DeviceTraits(CudaCapability(9, 0), 132, 227 << 10),
}
BUCKETS = (4, 16, 64, 1024)
Body = Callable[[TritonKernels], None]


@frozen
class CompiledKernel:
    """The name of a compiled kernel, and the bytes of shared memory of one program.

    form: its file in Triton's language for GPUs. binary: that of its machine code.
    """

    name: str
    shared: int
    form: Path
    binary: Path


@define
class Compilation:
    """The kernels that have been compiled, or found in Triton's cache."""

    kernels: list[CompiledKernel] = field(factory=list[CompiledKernel])

    def __call__(self, *, metadata: Any, metadata_group: dict[str, str], **_: object) -> None:
        about = metadata if isinstance(metadata, dict) else metadata._asdict()
        form, binary = (Path(metadata_group[f"{about['name']}.{kind}"]) for kind in ("ttgir", "cubin"))
        self.kernels.append(CompiledKernel(about["name"], about["shared"], form, binary))


@contextmanager
def compile_for(traits: DeviceTraits, cache: str) -> Iterator[Compilation]:
    """Compile all launches of this context for such a device. cache: the folder of compiled kernels."""
    can = traits.capability
    arch = 10 * can.major + can.minor
    answers = {"device": 1000 + arch, "target": GPUTarget("cuda", arch, 32), "stream": 0}
    fake = {f"get_current_{name}": lambda *_, found=found: found for name, found in answers.items()}
    found = Compilation()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        patch.setattr(driver, "_active", SimpleNamespace(**fake))
        patch.setattr(triton_launch, "suppress", lambda *_: nullcontext())  # no error is passed over
        patch.setattr(knobs.compilation, "listener", found)
        patch.setattr(JITFunction, "warmup", _checked(JITFunction.warmup))
        with triton_launch.withhold_launches():
            yield found


def _checked(warmup: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a launch if it names all constants, also those with a default value.

    `triton_launch.launch` needs them all.
    """

    def run(self: JITFunction[Any], *args: Any, **options: Any) -> Any:
        missing = [name for name in self.arg_names[len(args) :] if name not in options]
        assert not missing, (self.__name__, missing)
        return warmup(self, *args, **options)

    return run


def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def make_batch(kind: type[Batch], bucket: int, *, settles: bool = False) -> Any:
    """Return a batch of one segment that fills its bucket. settles: of a `StateBatch`."""
    batch = kind(bucket, CPU)
    if isinstance(batch, BlockBatch | StateBatch):
        batch.before = (0,)
    if isinstance(batch, StateBatch):
        batch.settles = settles
    batch.load(Step((Segment(0, 0, bucket),), bucket), None)
    return batch


def multiply(dtype: torch.dtype, columns: int, *buckets: int, depth: int = 256) -> Body:
    """Products with weights that are not packed, of so many columns, and logits. depth: terms of a sum."""

    def run(kernels: TritonKernels) -> None:
        weight = make(columns, depth, dtype=dtype)
        plain, gated = kernels.pack(weight), kernels.pack_gated(weight)
        for count in buckets:
            kernels.linear(make(count, depth, dtype=dtype), plain)
            kernels.gated_linear(make(count, depth, dtype=dtype), gated)
            logits = make(count, columns, dtype=torch.float32)
            kernels.write_logits(make(count, depth, dtype=dtype), make(depth, dtype=dtype), 1e-6, plain, logits)

    return run


def multiply_packed(layout: StepLayout, outputs: int, *buckets: int, dtype: torch.dtype = torch.bfloat16) -> Body:
    """Products with packed weights. outputs: from `FEW` on a sum is one chain, below that it has pieces."""

    def run(kernels: TritonKernels) -> None:
        matrix = random_matrix((outputs, 512), layout, "w")
        plain = kernels.pack(StackedWeight((matrix,), dtype, CPU))
        gated = kernels.pack_gated(StackedWeight((matrix, matrix), dtype, CPU))
        for count in buckets:
            kernels.linear(make(count, 512, dtype=dtype), plain)
            kernels.gated_linear(make(count, 512, dtype=dtype), gated)

    return run


def attend(
    head: int,
    *buckets: int,
    rows: Rows = torch.bfloat16,
    group: int = 4,
    rule: AttentionRule | None = None,
    paged: bool = False,
) -> Body:
    """Heads rotated and written to a cache of such rows, and attention over it. paged: rows are in pages."""

    def run(kernels: TritonKernels) -> None:
        own = rule or AttentionRule()
        kv = 1 if own.latent else 2
        types = row_types(rows)
        layout = RowLayout(types, head, latent=bool(own.latent))
        dtype = torch.float32 if types.keys.dtype is torch.float32 else torch.bfloat16
        places, capacity = (32, PAGE) if paged else (2, 4096)
        memory = torch.zeros(len(layout.parts), places, kv, capacity, layout.width, dtype=layout.dtype)
        keys, values = layout.open_parts(tuple(memory))
        rotated = head - own.latent if own.latent else head
        rope = Rope(make(4096, rotated // 2, dtype=torch.float32), make(4096, rotated // 2, dtype=torch.float32))
        heads = group * kv + (1 if own.latent else 2 * kv)
        for bucket in buckets:
            batch = make_batch(Batch, bucket)
            batch.pages = torch.arange(32, dtype=torch.int32).view(2, 16) if paged else None
            kernels.prepare_step(batch)
            q = kernels.rotate_store(make(bucket, heads * head, dtype=dtype), HeadPrep(), rope, batch, keys, values)
            kernels.attend(q, keys, values, batch, own)

    return run


def attend_beside_prompt(head: int, bucket: int) -> Body:
    """Attention of a decode row and of a prompt's rows in one forward, over pages."""

    def run(kernels: TritonKernels) -> None:
        keys = make(16, 2, PAGE, head)
        batch = Batch(bucket, CPU, pages=torch.zeros(2, 4, dtype=torch.int32))
        batch.load(Step((Segment(0, 7, 1), Segment(1, 0, bucket - 1)), bucket), None)
        kernels.prepare_step(batch)
        assert batch.plan.apart == kernels.traits.capability.has_hopper_kernels
        kernels.attend(make(bucket, 8, head), keys, keys, batch)

    return run


def attend_block(head: int, bucket: int, heads: int = 8, latent: int = 0) -> Body:
    def run(kernels: TritonKernels) -> None:
        batch = make_batch(BlockBatch, bucket)
        keys = make(2, 1 if latent else 2, 4096, head)
        kernels.attend_block(make(bucket, heads, head), keys, keys, batch, AttentionMask(causal=True), latent)

    return run


# Of steps of recurrent layers: settles, mixed, holds, single.
KINDS = [
    (False, False, False, False),
    (False, False, False, True),
    (True, False, False, False),
    (True, False, True, False),
    (False, True, True, False),
]


def advance_states(shape: DeltaShape, dtype: torch.dtype, *buckets: int) -> Body:
    """A layer of the gated delta rule, settled and not."""

    def run(kernels: TritonKernels) -> None:
        delta = kernels.delta
        wide = {"dtype": torch.float32}
        weights = DeltaWeights(
            shape, make(shape.channels, 4, **wide), make(shape.value_heads, **wide), make(shape.value_heads, **wide)
        )
        state = delta.make_state(shape, 2, 1, dtype, CPU)
        for bucket in buckets:
            for settles, mixed, holds, single in KINDS:
                batch = make_batch(StateBatch, bucket, settles=settles)
                batch.mixed, batch.holds, batch.single = mixed, holds, single
                delta.begin_body("body", batch)
                convolved = delta.convolve(make(bucket, shape.channels, dtype=dtype), weights, state, batch)
                gates = make(bucket, 2 * shape.value_heads, dtype=dtype)
                made = delta.delta_rule(convolved, gates, weights, state, batch)
                flat = make(bucket, shape.value_heads * shape.value_size, dtype=dtype)
                delta.gated_norm(made, flat, make(shape.value_size, **wide), 1e-6)
                delta.apply_gate(flat, flat)
        delta.advance_state(LayerStates.of_layers(state, 1), 0, 0)

    return run


def run_experts(
    shape: ExpertsShape, dtype: torch.dtype, *buckets: int, layout: StepLayout | None = None, hidden: int = 512
) -> Body:
    """A layer of experts, of which the grouped products are one launch each. layout: of packed experts."""

    def run(kernels: TritonKernels) -> None:
        def pack(pack_one: Any, *rows: int, columns: int) -> Any:
            if layout is None:
                return pack_one(make(sum(rows), columns, dtype=dtype))
            parts = tuple(random_matrix((each, columns), layout, "w") for each in rows)
            return pack_one(StackedWeight(parts, dtype, CPU))

        def make_expert() -> GatedWeights:
            both = pack(kernels.pack_gated, shape.inner, shape.inner, columns=hidden)
            return GatedWeights(both, pack(kernels.pack, hidden, columns=shape.inner))

        router = kernels.pack_router(make(shape.router_outputs, hidden, dtype=dtype))
        each = kernels.stack_experts((make_expert() for _ in range(shape.count)), shape.count)
        correction = make(shape.count, dtype=torch.float32) if isinstance(shape, SigmoidExpertsShape) else None
        experts = Experts(shape, router, each, None, correction=correction)
        for bucket in buckets:
            x, batch = make(bucket, hidden, dtype=dtype), make_batch(Batch, bucket)
            kernels.experts(x, experts, batch)
            late = kernels.experts_late(x, experts, batch)
            kernels.add_norm(x, late, make(hidden, dtype=dtype), 1e-5)
            add_delta(x, late)

    return run


def run_biased_experts(kernels: TritonKernels) -> None:
    """A layer of experts with biases and a gate that no product has."""
    shape = BiasedExpertsShape(8, 2, 256, is_normalized=True)

    def make_expert() -> GatedWeights:
        packed = kernels.pack(make(512, 512)), kernels.pack(make(512, 256))
        return GatedWeights(*packed, CLAMPED, make(512), make(512))

    each = kernels.stack_experts((make_expert() for _ in range(8)), 8)
    experts = Experts(shape, kernels.pack_router(make(8, 512)), each, None, correction=make(8, dtype=torch.float32))
    for bucket in (4, 1024):
        kernels.experts(make(bucket, 512), experts, make_batch(Batch, bucket))


def run_row_of_experts(kernels: TritonKernels) -> None:
    """A layer of packed experts with biases, for one row, and the norm behind it."""
    hidden, inner, count = 512, 256, 8
    shape = BiasedExpertsShape(count, 4, inner, is_normalized=True)
    gates, downs = (random_matrix(size, MXFP4, "w") for size in ((inner, hidden), (hidden, inner)))

    def make_expert() -> GatedWeights:
        both = kernels.pack(StackedWeight((gates, gates), torch.bfloat16, CPU))
        down = kernels.pack(StackedWeight((downs,), torch.bfloat16, CPU))
        return GatedWeights(both, down, CLAMPED, make(2 * inner), make(hidden))

    each = kernels.stack_experts((make_expert() for _ in range(count)), count)
    router = kernels.pack_router(make(count, hidden))
    experts = Experts(shape, router, each, None, correction=make(count, dtype=torch.float32))
    for weight in (make(hidden), make(hidden, dtype=torch.float32)):
        late = kernels.experts_late(make(1, hidden), experts, make_batch(Batch, 1))
        kernels.add_norm(make(1, hidden), late, weight, 1e-5)
        add_delta(make(1, hidden), late)


def norm_and_gate(kernels: TritonKernels) -> None:
    """Rows that are normed and added, biases, and products gated by GELU."""
    weight, rows = make(2816, dtype=torch.float32), make(4, 2816)
    kernels.add_normed(rows, NormedRows(rows, weight), 1e-6, (weight, weight, weight))
    kernels.add_normed(rows, NormedRows(rows, weight, (rows, weight, weight), 0.5), 1e-6)
    kernels.add_norm(rows, rows, weight, 1e-6, bias=make(2816))
    packed = kernels.pack_gated(make(512, 256), GELU)
    for count in (4, 64, 1024):
        kernels.gated_linear(make(count, 256), packed)
    matrix = random_matrix((64, 512), MXFP4, "w")
    behind = kernels.pack_gated(StackedWeight((matrix, matrix), torch.bfloat16, CPU), GELU)
    assert kernels.gated_linear(make(4, 512), behind).shape == (4, 64)


def pick_tokens(kernels: TritonKernels) -> None:
    """Picking tokens: the greatest logits, and draws."""
    logits = torch.zeros(4, 5000)
    tokens, extremes = find_extremes(logits)
    sampling = Sampling(seed=1, temperature=0.7, top_k=20, top_p=0.9)
    found = torch.zeros(1, 3, dtype=torch.float64)
    draw_tokens(logits, extremes, [0], [sampling], [5], tokens=tokens[:1], found=found)


def apply_biases_and_penalties(_: TritonKernels) -> None:
    """Biases and penalties: of a prompt, of counted tokens, and of tokens that the step carries along."""
    sampling = Sampling(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3)
    penalties = GpuPenalties(sampling, (1, 2, 3), 5000, {7: 1.0}, CPU)
    penalties.append(range(PENDING + 1))
    apply_penalties(torch.zeros(2, 5000), [(penalties, (4,)), (None, ())])


def embed_tokens(kernels: TritonKernels) -> None:
    """Rows of an embedding in host memory, which is another device. Torch reads one on the device."""
    kernels.embed(make(5000, 512).to("meta"), torch.zeros(4, dtype=torch.int64), make(4, 512))
