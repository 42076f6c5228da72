"""The hybrid: its delta rule by chunks is the rule row by row, and what is exported is what transformers reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.lazy_module import LazyModule
from training import evaluate
from training.corpus import assemble
from training.delta_rule import gated_delta_rule
from training.export import export, load_hybrid
from training.hybrid import HYBRID, agreement, run, shrink_hybrid_recipe
from training.hybrid_model import Hybrid, HybridGeometry
from training.recipe import TARGET
from training.staging import DemoLimits
from training.train import digest, optimizers

transformers: Any = LazyModule("transformers")
TINY = HybridGeometry(hidden=64, inner=96, layers=4, head_dim=32, context=256)
PUBLISHED = {
    *("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
    *(f"mtp.layers.0.{norm}_layernorm.weight" for norm in ("input", "post_attention")),
    *(f"mtp.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"mtp.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mtp.layers.0.self_attn.{part}_norm.weight" for part in "qk"),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Hybrid(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def row_by_row(q, k, v, decay, beta):
    state, out = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=q.dtype), torch.zeros_like(v)
    for row in range(q.shape[2]):
        state = state * decay[:, :, row, None, None].exp()
        missing = v[:, :, row] - (k[:, :, row, None] @ state).squeeze(-2)
        state = state + k[:, :, row, :, None] * (beta[:, :, row, None] * missing)[:, :, None]
        out[:, :, row] = (q[:, :, row, None] @ state).squeeze(-2)
    return out


@pytest.mark.parametrize("length", [1, 64, 300])
def test_the_rule_by_chunks_is_the_rule_row_by_row(length):
    torch.manual_seed(length)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, length, 16, dtype=torch.float64), dim=-1) for _ in "qk")
    v = torch.randn(2, 3, length, 8, dtype=torch.float64)
    decay, beta = -torch.rand(2, 3, length, dtype=torch.float64), torch.rand(2, 3, length, dtype=torch.float64)
    torch.testing.assert_close(gated_delta_rule(q, k, v, decay, beta), row_by_row(q, k, v, decay, beta))


def test_what_is_exported_gives_transformers_the_same_logits(model, tokenizer, tmp_path):
    export(model, tokenizer, tmp_path)
    again = load_hybrid(tmp_path, "cpu", torch.float32)
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(16, 4096, (2, 150))
    with torch.no_grad():
        torch.testing.assert_close(
            again.logits(again.compute_hidden(tokens)), theirs(tokens).logits, atol=2e-4, rtol=1e-4
        )
    assert {name for name in again.state_dict() if name.startswith("mtp.")} == PUBLISHED


def test_from_where_the_heads_rows_are_counted_changes_nothing(model):
    """Published heads count row t by the hidden state of t, ours by its token, t + 1: rotary embedding tells how far
    rows are apart, and nothing else does."""
    tokens = torch.randint(16, 4096, (1, 40))
    with torch.no_grad():
        hidden = model.compute_hidden(tokens)
        ours = model.ahead(tokens, hidden, first=True)
        before = torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        later = model.cos[9:49], model.sin[9:49]
        theirs = model.mtp(model.model.embed_tokens(tokens), before, *later)
    torch.testing.assert_close(ours, theirs)


def test_the_head_moves_nothing_but_itself(model):
    tokens, weights = torch.randint(16, 4096, (2, 65)), torch.ones(2, 65)
    model(tokens, weights).backward()
    moved = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    hidden = model.compute_hidden(tokens[:, :-1])
    model.losses[0](hidden, model.model.embed_tokens.weight, model.unused, tokens[:, 1:], weights[:, 1:])[0].backward()
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, moved[f"model.{name}"])
    assert all(moved[name].abs().max() > 0 for name in PUBLISHED)


@pytest.mark.long
def test_training_teaches_model_and_head(source, tokenizer):
    torch.manual_seed(0)
    model = Hybrid(TINY)
    tokens = torch.randint(16, 200, (2, 65)).repeat(1, 1)
    steppers, losses = optimizers(model, TARGET.cycles[0].rates), []
    stepped = {id(p) for stepper in steppers for group in stepper.param_groups for p in group["params"]}
    assert stepped == {id(parameter) for parameter in model.parameters()}
    for _ in range(30):
        losses.append(model(tokens, torch.ones(2, 65)))
        losses[-1].backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    assert losses[-1] < losses[0] - 2
    assert 0 <= agreement(model, tokenizer, ["def f():\n    return 1\n" * 9], 64)[0] <= 1
    assert digest(model) != digest(Hybrid(TINY))


@pytest.mark.timeout(180)
@pytest.mark.long
def test_all_of_it_runs_small(source, tokenizer, tmp_path, monkeypatch):
    """This runs all steps of `make train-demo-hybrid`, from a corpus and a tokenizer that are there."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    texts = dict.fromkeys(("train", "held_out", "held_out_packages", "apart"), source.texts)
    assemble(**texts, python="3.11", packages=["cattrs 26"], packages_apart=["attrs 26"]).save(work / "corpus.json.xz")
    tokenizer.save(str(work / "tokenizer.json"))
    monkeypatch.setattr(evaluate, "ABOUT", evaluate.ABOUT[:1])  # a decoding without a cache takes its time
    monkeypatch.setattr(evaluate, "SMALL_TALK", ())
    monkeypatch.setattr(evaluate, "STRANGE_PROMPTS", evaluate.STRANGE_PROMPTS[:1])
    small = shrink_hybrid_recipe(HYBRID)
    run(evolve(small, geometry=evolve(small.geometry, layers=4, context=256)), work, out, DemoLimits(math.inf, 0, 0))
    card = " ".join((out / "README.md").read_text().split())
    assert digest(load_hybrid(out, "cpu", torch.float32)) in card
    for phrase in ("3 steps of 2 windows of 255 tokens", "cattrs 26", "head, token 2 in a row", "several needles, 256"):
        assert phrase in card
