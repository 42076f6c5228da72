"""Windows, sinks and caps of attention on a CPU: right, and of the same bits however a sequence is cut into steps."""

from __future__ import annotations

import pytest
import torch

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionRule
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from tests.child_code import check_interpreted
from tests.pairs import usual_where

CPU = torch.device("cpu")
HEADS, KV, HEAD, CAPACITY, LENGTH = 6, 2, 32, 1024, 700
SINKS = torch.linspace(-2, 3, HEADS)
RULES = {
    "plain": PLAIN,
    "a window of 1": AttentionRule(window=1),
    "a window of 100": AttentionRule(window=100),
    "a window of a tile": AttentionRule(window=256),
    "a window longer than the sequence": AttentionRule(window=5000),
    "sinks": AttentionRule(sinks=SINKS),
    "a cap": AttentionRule(cap=3.0),
    "all three": AttentionRule(window=130, cap=3.0, sinks=SINKS),
}
# One row at a time at the beginning, and across an edge of tiles
ROW_BY_ROW = [*[(4, 1)] * 40, (512, 330), *[(4, 1)] * 60, (512, 512)]
CUTS = ([(256, 256)], ROW_BY_ROW, [(64, 50), (128, 128), (16, 9)])


def random(*shape, seed):
    return torch.randn(shape, generator=make_generator(seed))


def angles():
    table = torch.outer(torch.arange(CAPACITY), 1e4 ** -torch.linspace(0, 1, HEAD // 2))
    return Rope(table.cos(), table.sin())


PREP = HeadPrep(None, random(HEAD, seed=1) + 1, random(HEAD, seed=2) + 1, 1e-6)
QKV = random(LENGTH, (HEADS + 2 * KV) * HEAD, seed=3)


def attended(kernels, rule, pieces, *, prep=PREP, dtype=torch.float32, slot=0):
    """Return the attention of the whole sequence, cut into (bucket, rows) pieces, the last of which is repeated."""
    caches = [torch.zeros(2, KV, CAPACITY, HEAD, dtype=dtype) for _ in "kv"]
    found, at, index = [], 0, 0
    while at < LENGTH:
        bucket, count = pieces[min(index, len(pieces) - 1)]
        count = min(count, LENGTH - at)
        batch = Batch(bucket, CPU)
        batch.load(Step((Segment(slot, at, count),), bucket), [0] * count)
        kernels.prepare_step(batch)
        rows = torch.nn.functional.pad(QKV[at : at + count], (0, 0, 0, bucket - count)).to(dtype)
        q = kernels.rotate_store(rows, prep, angles(), batch, *caches)
        found.append(kernels.attend(q, *caches, batch, rule)[:count].clone())
        at, index = at + count, index + 1
    return torch.cat(found)


def exact(rule):
    """Attention in float64, head by head as the rule says it."""
    kernels = ReferenceKernels()
    batch = Batch(LENGTH, CPU)
    batch.load(Step((Segment(0, 0, LENGTH),), LENGTH), [0] * LENGTH)
    caches = [torch.zeros(1, KV, CAPACITY, HEAD) for _ in "kv"]
    q = kernels.rotate_store(QKV, PREP, angles(), batch, *caches).double()
    out = torch.zeros(LENGTH, HEADS, HEAD, dtype=torch.float64)
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)  # how many rows a key is behind a query
    seen = (behind >= 0) & (behind < (rule.window or LENGTH))
    for head in range(HEADS):
        k, v = (cache[0, head // (HEADS // KV), :LENGTH].double() for cache in caches)
        scores = q[:, head] @ k.mT * HEAD**-0.5
        scores = (scores / rule.cap).tanh() * rule.cap if rule.cap else scores
        weights = scores.exp() * seen
        beside = 0.0 if rule.sinks is None else rule.sinks[head].double().exp()
        out[:, head] = weights @ v / (weights.sum(1) + beside)[:, None]
    return out.flatten(1)


@pytest.mark.parametrize("rule", RULES.values(), ids=[*RULES])
def test_every_kernel_attends_as_the_rule_says(rule):
    expected = exact(rule)
    for kernels in (ReferenceKernels(), CpuKernels(torch.float32), CpuKernels(torch.float32, own=False)):
        found = attended(kernels, rule, [(256, 256)])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-6)


# The dtypes take turns, in C and by torch: a rule decides which keys a row sees, and no dtype has a say in that.
@usual_where(lambda places: (places["own"] + places["dtype"] + places["rule"]) % 2 == 0)
@pytest.mark.parametrize("own", [True, False], ids=["in C", "by torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=[*RULES])
def test_a_row_has_the_same_bits_however_the_sequence_is_cut(rule, dtype, own):
    kernels = CpuKernels(dtype, own=own)
    whole = attended(kernels, rule, [(512, 512)], dtype=dtype)
    for pieces in CUTS:
        if not own and pieces is ROW_BY_ROW:
            continue  # products of torch have their bits only in row counts that are proven
        found = attended(kernels, rule, pieces, dtype=dtype, slot=1)
        close = {"rtol": 0, "atol": 0} if own else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(found, whole, **close)


def test_rows_behind_a_window_are_not_read(native_code):
    kernels = CpuKernels(torch.float32)
    assert kernels.native_attention is not None, native_code
    rule = AttentionRule(window=100)
    caches = [random(1, KV, CAPACITY, HEAD, seed=seed) for seed in (4, 5)]
    batch = Batch(4, CPU)
    batch.load(Step((Segment(0, 600, 2),), 4), [0, 0])
    kernels.prepare_step(batch)
    q = random(4, KV, HEADS // KV, HEAD, seed=6)
    expected = kernels.attend(q, *caches, batch, rule)[:2].clone()
    for cache in caches:
        cache[:, :, :384] = float("nan")  # the first row sees keys from 501 on, and tiles have 128 keys
    assert torch.equal(kernels.attend(q, *caches, batch, rule)[:2], expected)


@pytest.mark.parametrize("own", [True, False], ids=["in C", "by torch"])
def test_values_are_normed_where_a_model_norms_them(own):
    prep = HeadPrep(None, PREP.q_norm, PREP.k_norm, 1e-6, v_norm=True)
    expected = attended(ReferenceKernels(), PLAIN, [(256, 256)], prep=prep)
    found = attended(CpuKernels(torch.float32, own=own), PLAIN, [(256, 256)], prep=prep)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert not torch.allclose(found, attended(ReferenceKernels(), PLAIN, [(256, 256)]), atol=1e-2)


@pytest.mark.parametrize("own", [True, False], ids=["in C", "by torch"])
def test_queries_without_keys_of_their_own_are_rotated_alike(own):
    kernels = CpuKernels(torch.float32, own=own)
    batch = Batch(64, CPU)
    batch.load(Step((Segment(1, 33, 50),), 64), [0] * 50)
    kernels.prepare_step(batch)
    caches = [torch.zeros(2, KV, CAPACITY, HEAD) for _ in "kv"]
    rows = QKV[:64].clone()
    both = kernels.rotate_store(rows, PREP, angles(), batch, *caches).clone()
    kept = [cache.clone() for cache in caches]
    alone = kernels.rotate_queries(rows[:, : HEADS * HEAD].contiguous(), PREP, angles(), batch, caches[0])
    assert torch.equal(both[:50], alone[:50])
    assert all(map(torch.equal, kept, caches)), "nothing is written"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "check",
    [
        *("check_rule(0)", "check_rule(1)", "check_rule(2)"),
        *("check_queries()", "check_latents()", "check_blocks()", "check_packed_rows()"),
    ],
)
def test_the_triton_kernels_attend_alike_in_the_interpreter(check):
    check_interpreted(f"from tests.models.kernels import interpreted_attention; interpreted_attention.{check}", 500)
