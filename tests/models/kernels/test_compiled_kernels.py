"""Kernels compile for Ampere, Ada and Hopper, in tiles that fit into the shared memory there. Nothing runs."""

from __future__ import annotations

import pytest
import torch

from adapters.checkpoint.packed_matrix import MXFP4, StackedWeight, StepLayout
from adapters.models.kernels.cuda_capability import NO_CAPABILITY, CudaCapability, read_capability
from adapters.models.kernels.formats.row_format import read_row_types
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.interfaces.delta_interface import DeltaShape
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape, SigmoidExpertsShape
from adapters.models.numerics.synthetic import random_matrix
from tests.models.kernels.compiled_code import (
    disassemble,
    find_overwritten_operands,
    find_torn_sums,
    read_operand_widths,
)

CAPABILITIES = {  # has Hopper's kernels, overlaps launches, converts E4M3
    CudaCapability(8, 0): (False, False, False),
    CudaCapability(8, 6): (False, False, False),
    CudaCapability(8, 9): (False, False, True),
    CudaCapability(9, 0): (True, True, True),
    CudaCapability(12, 0): (False, True, True),
    NO_CAPABILITY: (False, False, False),
}


@pytest.mark.parametrize(("can", "expected"), CAPABILITIES.items(), ids=str)
def test_a_capability_says_which_kernels_a_device_has(can: CudaCapability, expected: tuple[bool, ...]) -> None:
    assert (can.has_hopper_kernels, can.overlaps_launches, can.converts_e4m3) == expected


def test_a_processor_has_no_capability() -> None:
    assert read_capability(torch.device("cpu")) == NO_CAPABILITY


compiled = pytest.importorskip(
    "tests.models.kernels.compiled_kernels", reason="Triton comes with CUDA builds of torch", exc_type=ImportError
)
knobs = pytest.importorskip("triton").knobs

Q4_K = StepLayout("uint4", 32, per=8, inner=True, least="own")
FP8 = StepLayout("e4m3", 128, scale="float32")
ROUNDED = StepLayout("e4m3", 128, scale="float32", rounds_rows=True)
LAYOUTS = {
    "Q4_K": Q4_K,
    "Q6_K": StepLayout("int8", 16, per=16, inner=True),
    "Q5_K": StepLayout("int8", 32, per=8, inner=True, least="own"),
    "Q8_0": StepLayout("int8", 32),
    "IQ4_XS": StepLayout("iq4", 32, per=8, inner=True),
    "AWQ": StepLayout("uint4", 128, least="scale"),
    "FP8": FP8,
    "MXFP4": MXFP4,
}
FURTHER = {
    "Q4_0": StepLayout("int4", 32),
    "IQ4_NL": StepLayout("iq4", 32),
    "GPTQ, 8 bits": StepLayout("int8", 128, least="scale"),
    "w4a16": StepLayout("int4", 128),
    "w8a16": StepLayout("int8", 128),
}
BF16 = torch.bfloat16
HEADS = (64, 128, 256, 512)
EXPERTS = ExpertsShape(8, 2, 256, is_normalized=True)
SINKS = AttentionRule(window=128, sinks=torch.zeros(8))
BODIES = {
    "products": compiled.multiply(BF16, 128, 4, 16, 64, 1024),
    "products of many columns": compiled.multiply(BF16, 24576, 1024),
    "products in tiles that fit the processors": compiled.multiply(BF16, 5120, 512),
    "products of long sums": compiled.multiply(BF16, 128, 64, depth=8192),
    "products in float16": compiled.multiply(torch.float16, 128, 4, 64, 1024),
    "products in float32": compiled.multiply(torch.float32, 128, 4, 64, 1024),
    **{f"{name} in pieces": compiled.multiply_packed(one, 64, 4, 16, 64, 1024) for name, one in LAYOUTS.items()},
    **{f"{name} in one chain": compiled.multiply_packed(one, 16384, 4, 16, 64) for name, one in LAYOUTS.items()},
    **{f"{name} in pieces": compiled.multiply_packed(one, 64, 4, 64, 1024) for name, one in FURTHER.items()},
    **{f"{name} in one chain": compiled.multiply_packed(one, 16384, 4, 64) for name, one in FURTHER.items()},
    "FP8, rows as well": compiled.multiply_packed(ROUNDED, 256, 1, 4, 16, 64, 100, 1024),
    "FP8, rows as well, many columns": compiled.multiply_packed(ROUNDED, 16384, 1, 4, 2048),
    "one and many rows of Q4_K in one chain": compiled.multiply_packed(LAYOUTS["Q4_K"], 16384, 1, 1024),
    **{f"attention, heads of {head}": compiled.attend(head, 4, 64, 1024) for head in HEADS},
    **{f"attention of one row, heads of {head}": compiled.attend(head, 1, group=8) for head in HEADS},
    **{f"attention, int8, heads of {head}": compiled.attend(head, 4, 1024, rows=torch.int8) for head in HEADS},
    **{
        f"attention, {name}, heads of {head}": compiled.attend(head, 4, 1024, rows=read_row_types(name, BF16))
        for name in ("int4", "int3.5", "k=int8,v=int4", "k=bf16,v=int4")
        for head in (64, 128, 256)
    },
    **{
        f"attention of one row, {name}, heads of 256": compiled.attend(256, 1, rows=read_row_types(name, BF16), group=6)
        for name in ("int8", "int4")
    },
    "attention over pages": compiled.attend(128, 4, 64, paged=True),
    "attention beside a prompt": compiled.attend_beside_prompt(128, 256),
    "attention in float32": compiled.attend(128, 4, 1024, rows=torch.float32),
    "attention with a window and sinks": compiled.attend(64, 4, 1024, rule=SINKS),
    "attention of one row with a window and sinks": compiled.attend(64, 1, rule=SINKS),
    "attention with a window over pages": compiled.attend(256, 4, 64, rule=AttentionRule(1024), paged=True),
    "attention over latents": compiled.attend(576, 4, 1024, group=20, rule=AttentionRule(latent=512)),
    "attention of blocks": compiled.attend_block(128, 16),
    "attention of blocks over latents": compiled.attend_block(576, 4, 128, 512),
    "recurrent layers": compiled.advance_states(DeltaShape(2, 4, 128, 128), BF16, 4, 64, 1024),
    "recurrent layers in float32": compiled.advance_states(DeltaShape(2, 4, 128, 128), torch.float32, 4, 1024),
    "experts": compiled.run_experts(EXPERTS, BF16, 4, 64, 1024),
    "experts of odd widths": compiled.run_experts(ExpertsShape(11, 3, 72, is_normalized=True), BF16, 4, 64, hidden=104),
    **{
        f"experts in {name}": compiled.run_experts(EXPERTS, BF16, 4, 64, 128, 1024, layout=LAYOUTS[name])
        for name in LAYOUTS
    },
    "experts by sigmoids in float32": compiled.run_experts(
        SigmoidExpertsShape(8, 2, 256, is_normalized=True), torch.float32, 4, 64, 1024
    ),
    "experts with biases": compiled.run_biased_experts,
    "experts of one row": compiled.run_row_of_experts,
    "experts of one row in Q4_K": compiled.run_experts(EXPERTS, BF16, 1, layout=Q4_K),
    "rows": compiled.norm_and_gate,
    "picking": compiled.pick_tokens,
    "biases and penalties": compiled.apply_biases_and_penalties,
    "embeddings": compiled.embed_tokens,
}
FP8_ROWS = compiled.attend(128, 4, 1024, rows=torch.float8_e4m3fn)


@pytest.fixture
def cache(pytestconfig) -> str:
    """The folder of compiled kernels, which later runs find again."""
    return str(pytestconfig.cache.mkdir("triton"))


def check(target: str, body, cache: str) -> None:
    traits = compiled.TARGETS[target]
    with compiled.compile_for(traits, cache) as found:
        body(compiled.TritonKernels(compiled.CPU, traits=traits))
    assert found.kernels
    for kernel in found.kernels:
        assert kernel.shared <= traits.shared, kernel
        assert traits.capability.has_hopper_kernels or "ahead" not in kernel.name
        code = disassemble(kernel.binary, knobs.nvidia.nvdisasm.path)
        assert not find_torn_sums(code), kernel
        assert not find_overwritten_operands(code), kernel


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_a_product_with_packed_weights_compiles_with_and_without_instructions_for_e4m3(target, cache):
    def multiply(kernels) -> None:
        weight = StackedWeight((random_matrix((64, 512), FP8, "w"),), BF16, compiled.CPU)
        kernels.linear(compiled.make(4, 512), kernels.pack(weight))

    check(target, multiply, cache)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("target", "name"), [("sm_90", "packed_ahead"), ("sm_89", "packed_narrow")])
def test_weights_of_many_outputs_come_ahead_on_hopper_only(target, name, cache):
    traits = compiled.TARGETS[target]
    with compiled.compile_for(traits, cache) as found:
        compiled.multiply_packed(LAYOUTS["AWQ"], 16384, 4)(compiled.TritonKernels(compiled.CPU, traits=traits))
    assert {kernel.name for kernel in found.kernels} == {name}
    assert all(kernel.shared <= traits.shared for kernel in found.kernels)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("value_size", [64, 128])
def test_kernels_of_the_gated_delta_rule_hold_operands_in_one_way(value_size, cache):
    """Other fragments would add in another order, so that a row had other bits beside other rows."""
    traits = compiled.TARGETS["sm_90"]
    with compiled.compile_for(traits, cache) as found:
        layer = compiled.advance_states(DeltaShape(2, 4, 128, value_size), BF16, 4, 8, 1024)
        layer(compiled.TritonKernels(compiled.CPU, traits=traits))
    widths = {(kernel.name, width) for kernel in found.kernels for width in read_operand_widths(kernel.form)}
    in_one = ("read_single_rows", "factor_and_read")
    names = ("factor", "scan", "factor_single_rows", "read_factored_rows", *in_one)
    assert widths == {(name, 2) for name in names}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", compiled.TARGETS)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_kernels_compile_and_fit_into_shared_memory(target, body, cache):
    check(target, body, cache)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
def test_rows_in_e4m3_compile_where_there_are_instructions_for_them(target, cache):
    check(target, FP8_ROWS, cache)
