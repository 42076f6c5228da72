"""The drafter's scores: against attention written out in full, and the same bits in whatever pieces they were made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import adapters.models.decoder.scorer as scorer_module
from adapters.models.decoder.scorer import POOL, TAIL, Scorer
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.numerics.synthetic import RandomWeights
from adapters.models.open_checkpoint import Checkpoint
from tests.models import hybrids
from tests.models.checkpoints import VARIANTS, proven, save_model, tokens_of

TOKENS = 203  # of which a chunk of 64 leaves eleven, and one of 32 or 200 has the tail in two pieces


def scorer_of(folder: Path, *buckets: int, kernels: Kernels | None = None) -> Scorer:
    checkpoint = Checkpoint.open(folder)
    own = kernels or CpuKernels(torch.float32)
    made = Scorer(checkpoint.config, checkpoint, own, torch.device("cpu"), torch.float32, buckets, 2048)
    made.weights.load_back()
    return made


def scored(scorer: Scorer, tokens: Tensor) -> list[float]:
    work = scorer.begin(tuple(tokens.tolist()))
    turns = 0
    while not work.complete:
        work.advance()
        turns += 1
    assert turns == len(list(scorer_module.split_portions(len(tokens), scorer.chunk)))
    return work.scores()


def naive(model: object, tokens: Tensor, config: object, seen: Tensor | None = None) -> list[float]:
    """From the hidden states that transformers has before each layer, by the words of the description.

    seen: bool `[n, n]`, the rows that each row attends to; all before it, where there is none.
    """
    more = {} if seen is None else {"attention_mask": torch.zeros(seen.shape).masked_fill_(~seen, -1e30)[None, None]}
    with torch.no_grad():
        hidden = model(tokens.unsqueeze(0), output_hidden_states=True, **more).hidden_states
    count, heads, kv, width = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    best = torch.zeros(TAIL, count)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        rows = layer.input_layernorm(hidden[number][0])
        queries = attention.q_proj(rows).view(count, heads, width)
        keys = attention.k_proj(rows).view(count, kv, width)
        if hasattr(attention, "q_norm"):
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        for head in range(heads):
            for row in range(TAIL):
                at = count - TAIL + row
                seen = keys[: at + 1, head // (heads // kv)] @ queries[at, head] / width**0.5
                best[row, : at + 1] = torch.maximum(best[row, : at + 1], torch.softmax(seen, 0))
    mean = best.mean(0)
    half = POOL // 2
    return [float(mean[max(0, at - half) : at + half + 1].mean()) for at in range(count)]


@pytest.mark.parametrize("variant", ["qwen3, gqa 2 to 1", "llama, gqa 2 to 1", "qwen2, mqa, tied"])
def test_scores_are_those_of_attention_written_out(variant: str, tmp_path: Path) -> None:
    model_type, settings = VARIANTS[variant]
    model = save_model(tmp_path, model_type, **settings)
    tokens = tokens_of(TOKENS)
    with torch.no_grad():
        wanted = naive(model, tokens, Checkpoint.open(tmp_path).config)
    assert scored(scorer_of(tmp_path, 64), tokens) == pytest.approx(wanted, rel=2e-4, abs=1e-7)


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Tensor]:
    """Bands of 64 rows, and what each of so many rows then attends to, by the words of the description."""
    for name, value in (("SINK", 64), ("WINDOW", 128), ("BAND", 64), ("ASKING", 24)):
        monkeypatch.setattr(scorer_module, name, value)

    def seen(count: int) -> Tensor:
        row, key = torch.arange(count).unsqueeze(1), torch.arange(count)
        near = (key < 64) | (key >= row // 64 * 64 - 128) | (row >= count - 24)
        return near & (key <= row)

    return seen


@pytest.mark.parametrize("count", [400, 411])
def test_far_rows_of_a_long_prompt_attend_to_the_first_and_the_latest(
    count: int, short_windows: Callable[[int], Tensor], tmp_path: Path
) -> None:
    model = save_model(tmp_path, "qwen3")
    tokens, config = tokens_of(count), Checkpoint.open(tmp_path).config
    with torch.no_grad():
        wanted, dense = naive(model, tokens, config, short_windows(count)), naive(model, tokens, config)
    assert wanted != pytest.approx(dense, rel=2e-3, abs=1e-7), "the prompt is too short for this test"
    assert scored(scorer_of(tmp_path, 64), tokens) == pytest.approx(wanted, rel=2e-4, abs=1e-7)


@pytest.mark.usefixtures("short_windows")
def test_scores_of_bands_are_the_same_bits_in_any_pieces(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    config, tokens = Checkpoint.open(tmp_path).config, tokens_of(411)
    kernels = proven(config, torch.float32, 2048)
    whole, *others = (
        scored(scorer_of(tmp_path, *buckets, kernels=kernels.copy_for_shard()), tokens)
        for buckets in ((8, 256), (4, 8, 16, 32), (64,))
    )
    assert others == [whole, whole]


def test_scores_are_the_same_bits_in_any_pieces(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    config, tokens = Checkpoint.open(tmp_path).config, tokens_of(TOKENS)
    kernels = proven(config, torch.float32, 2048)
    whole = scored(scorer_of(tmp_path, 8, 256, kernels=kernels), tokens)
    for buckets in ((8, 32), (64,), (4, 8, 16, 32, 64, 128)):
        assert scored(scorer_of(tmp_path, *buckets, kernels=kernels.copy_for_shard()), tokens) == whole
    assert len(set(whole)) > TOKENS // 2


def test_a_hybrid_scores_with_the_layers_that_attend() -> None:
    shape, tokens = hybrids.config((2, 4, 32, 32), 512, 96, 160, 3, 3, 1, 32, 2048, 1e6, rotated=8), tokens_of(TOKENS)
    found = list[list[float]]()
    for buckets in ((256,), (64,)):
        made = Scorer(
            shape, RandomWeights(shape), CpuKernels(torch.float32), torch.device("cpu"), torch.float32, buckets, 2048
        )
        made.weights.load_back()
        found.append(scored(made, tokens % shape.vocab_size))
    whole, pieces = found
    assert pieces == pytest.approx(whole, rel=1e-3, abs=1e-6)
    assert sum(whole) > 0


def test_two_prompts_take_turns_and_change_nothing_of_each_other(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    scorer, one, other = scorer_of(tmp_path, 64), tokens_of(90), tokens_of(150, seed=8)
    alone = scored(scorer, one), scored(scorer, other)
    works = [scorer.begin(tuple(tokens.tolist())) for tokens in (one, other)]
    while not all(work.complete for work in works):
        for work in works:
            if not work.complete:
                work.advance()
    assert tuple(work.scores() for work in works) == alone


@pytest.mark.parametrize("count", [TAIL - 1, 2049])
def test_a_prompt_that_cannot_be_scored_is_named(count: int, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    with pytest.raises(ValueError, match=f"a prompt of {count} tokens; accepted: {TAIL} to 2048"):
        scorer_of(tmp_path, 64).begin((1,) * count)
