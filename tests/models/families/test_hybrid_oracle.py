"""Models with positional state, recurrent or of windows, against transformers, on small random checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from tests.models.checkpoints import save_model, shard_of, tokens_of
from tests.models.hybrids import HYBRIDS, SPARSE, advance
from tests.models.windowed import WINDOWED
from tests.pairs import one_in, usual_where

KERNELS = {"reference": lambda _: ReferenceKernels(), "cpu": CpuKernels}
KERNEL_NAMES = [*KERNELS]


MODELS = {name: ("qwen3_5_text", settings) for name, settings in HYBRIDS.items()} | SPARSE | WINDOWED


@pytest.fixture(scope="module", params=[*MODELS])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model_type, settings = MODELS[request.param]
    return folder, save_model(folder, model_type, **settings)


# The reference kernels have the logits of a third of the models. What else they do is seen with the first one.
briefly = usual_where(lambda places: places["kernels"] == KERNEL_NAMES.index("cpu") or places["model"] == 0)


@pytest.fixture(params=KERNEL_NAMES)
def kernels(request):
    return KERNELS[request.param]


# By what is in C every model is compared, by the reference kernels one in three.
@usual_where(lambda places: places["kernels"] == KERNEL_NAMES.index("cpu") or places["model"] % 3 == 0)
def test_logits_in_float32_are_those_of_transformers(model, kernels):
    folder, oracle = model
    tokens = tokens_of(333)
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    found = advance(shard_of(folder, kernels=kernels(torch.float32)), tokens, [64, 37, 64, 1, 1, 63, 2, 64, 16, 5])
    # Logits reach 5. Those of transformers, too, are up to 3e-4 from float64's, on AVX2 others than on AVX-512.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=6e-4)


@one_in(4, "model", 2)
@briefly
def test_a_chunk_of_prefill_leaves_what_its_rows_leave(model, kernels):
    folder, oracle = model
    tokens = tokens_of(300)
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    shard = shard_of(folder, kernels=kernels(torch.float32))
    shard.forward(Step((Segment(0, 0, 200),), 256, rows_only=True), tokens[:200])
    shard.forward(Step((Segment(0, 200, 90),), 128, rows_only=True), tokens[200:290])
    found = advance(shard, tokens[290:], [3, 1], start=290)
    torch.testing.assert_close(found, expected[290:], rtol=1e-5, atol=2e-4)


# Logits of every model are compared row by row above.
@one_in(4, "model")
@briefly
def test_greedy_tokens_are_those_of_transformers(model, kernels):
    folder, oracle = model
    tokens = tokens_of(60)
    with torch.no_grad():
        expected = oracle.generate(tokens[None], max_new_tokens=16, do_sample=False, eos_token_id=None)[0]
    shard = shard_of(folder, kernels=kernels(torch.float32))
    sequence = tokens.tolist()
    shard.forward(Step((Segment(0, 0, 59),), 64, rows_only=True), tokens[:-1])
    while len(sequence) < len(expected):
        logits = advance(shard, torch.tensor(sequence[-1:]), [1], start=len(sequence) - 1)
        sequence.append(int(logits[0].argmax()))
    assert sequence == expected.tolist()


@one_in(4, "model", 1)
@briefly
def test_greedy_tokens_in_bfloat16_are_those_of_transformers_in_float32_where_rounding_decides_nothing(model, kernels):
    folder, oracle = model
    tokens = tokens_of(300)
    with torch.no_grad():
        exact = oracle(tokens[None]).logits[0]
        theirs = copy.deepcopy(oracle).to(torch.bfloat16)(tokens[None]).logits[0].float()
    ours = advance(shard_of(folder, torch.bfloat16, kernels(torch.bfloat16)), tokens, [64, 1, 1, 37])
    first, second = exact.topk(2).values.unbind(1)
    clear = first - second > 4 * (theirs - exact).abs().amax(1)
    assert clear.sum() >= 10
    # One of experts that are almost equally wanted may be another one, as below.
    accepted = clear.sum() // 50 if getattr(oracle.config, "num_experts", 0) else 0
    assert (ours[clear].argmax(1) != exact[clear].argmax(1)).sum() <= accepted


@one_in(2, "model")
@usual_where(lambda places: places["kernels"] == 0 or places["model"] == 0)
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("cpu", torch.bfloat16),
        ("reference", torch.bfloat16),
        pytest.param("cpu", torch.float16, marks=pytest.mark.long),
    ],
    indirect=["kernels"],
)
def test_logits_in_half_precision_are_as_close_to_float32_as_those_of_transformers(model, kernels, dtype):
    folder, oracle = model
    tokens = tokens_of(192)
    with torch.no_grad():
        exact = oracle(tokens[None]).logits[0]
        theirs = copy.deepcopy(oracle).to(dtype)(tokens[None]).logits[0].float()
    ours = advance(shard_of(folder, dtype, kernels(dtype)), tokens, [64])
    # Of most rows: one of experts that are almost equally wanted may be another one, which is a step in either's error.
    our_error, their_error = ((one - exact).square().mean(1).median() for one in (ours, theirs))
    assert our_error <= 1.2 * their_error


@one_in(4, "model")
@briefly
def test_a_copied_slot_goes_on_as_its_source_does(model, kernels):
    folder, _ = model
    tokens, shard = tokens_of(150), shard_of(folder, kernels=kernels(torch.float32))
    advance(shard, tokens[:100], [64, 36])
    shard.rows.copy(0, 2, 100)
    shard.states.copy(0, 2)
    ours, theirs = (advance(shard, tokens[90:], [7], slot=slot, start=90) for slot in (0, 2))
    assert torch.equal(ours, theirs)
