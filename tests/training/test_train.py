"""A tiny run of the whole pipeline: the loss falls, the export loads elsewhere with the same numbers."""

from __future__ import annotations

import json

import pytest
import torch
from attrs import evolve
from transformers import Qwen3ForCausalLM

from adapters.training.batches import Batches, Shape
from adapters.training.corpus import Corpus, assemble
from adapters.training.dialogues import chat
from adapters.training.evaluate import Exam, examine, talk
from adapters.training.export import export, load
from adapters.training.model import UNUSED_IDS, Geometry, Qwen3
from adapters.training.recipe import TARGET, smallest
from adapters.training.train import Rates, Stage, digest, schedule, train

TINY = Geometry(hidden=64, inner=96, layers=2, heads=2, head_dim=32, context=256)
RATES = Rates(matrices=1e-2, others=1e-2, falling=0.5)


@pytest.fixture
def small_run(source, tokenizer):
    def batches(stage, seed):
        return Batches(tokenizer, source, stage.mixture, stage.shape, seed)

    def run():
        torch.manual_seed(0)
        model = Qwen3(TINY)
        stage = Stage("small", Shape(4, 127), {chat: 1.0}, steps=40, share=1.0, whole=0.3)
        before = model(*batches(stage, 1)[1000]).item()
        progress = train(model, batches, [stage], rates=RATES, seed=1)
        after = model(*batches(stage, 1)[1000]).item()
        return model, progress, before, after

    return run


def test_the_loss_falls_and_the_same_seed_gives_the_same_parameters(small_run):
    model, progress, before, after = small_run()
    assert progress.steps == {"small": 40}
    assert after < before - 1
    assert digest(model) == digest(small_run()[0])


def test_ids_that_are_never_used_get_no_gradient_as_outputs():
    model = Qwen3(TINY)
    tokens = torch.randint(16, 4096, (2, 33))
    model(tokens, torch.ones(2, 33)).backward()
    table = model.model.embed_tokens.weight
    assert table.grad[list(UNUSED_IDS)].abs().max() == 0
    assert table.grad[20:].abs().max() > 0


def test_tokens_without_weight_do_not_count():
    model = Qwen3(TINY)
    tokens = torch.randint(16, 4096, (1, 33))
    weights = torch.zeros(1, 33)
    weights[:, :17] = 1
    other = tokens.clone()
    other[:, 18:] = 0  # also an id that is never predicted
    assert model(tokens, weights).item() == pytest.approx(model(other, weights).item())


def test_a_text_that_spells_an_unused_id_has_a_finite_loss():
    model = Qwen3(TINY)
    tokens = torch.randint(16, 4096, (1, 33))
    tokens[0, 7] = UNUSED_IDS[0]
    weights = torch.ones(1, 33)
    weights[0, 7] = 0
    assert model(tokens, torch.ones(1, 33)).item() == pytest.approx(model(tokens, weights).item())


def test_an_export_loads_in_transformers_with_the_same_logits_and_never_predicts_unused_ids(tmp_path, tokenizer):
    torch.manual_seed(1)
    model = Qwen3(TINY)
    export(model, tokenizer, tmp_path)
    loaded = load(tmp_path, "cpu", torch.float32)
    tokens = torch.randint(16, 4096, (2, 40))
    with torch.inference_mode():
        ours = loaded.logits(loaded.hidden(tokens))
        theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.isin(ours.argmax(-1), torch.tensor(UNUSED_IDS)).any()
    assert (ours[..., list(UNUSED_IDS)].amax(-1) < ours.amax(-1)).all()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())


def test_exams_and_talks_run_on_an_untrained_model(source, tokenizer):
    model = Qwen3(TINY)
    score = examine(model, tokenizer, source, Exam("chat", chat, 256, 4))
    assert score.answers >= 1
    assert 0 <= score.exact <= 1
    assert len(talk(model, tokenizer, ["Hello", "Who are you?"], 5)) == 2


def test_the_rate_rises_stays_and_falls():
    assert schedule(0, 0.0, 0.5) == 0.01
    assert schedule(500, 0.3, 0.5) == 1.0
    assert schedule(500, 0.75, 0.5) == pytest.approx(0.5)
    assert schedule(500, 1.0, 0.5) == 0.01


def test_a_corpus_comes_back_from_its_file_with_its_digest(tmp_path):
    corpus = assemble(["a = 1\n"], ["b = 2\n"], ["c = 3\n"], "3.11", ["attrs 26"])
    corpus.save(tmp_path / "corpus")
    assert Corpus.load(tmp_path / "corpus") == corpus
    assert assemble(["a = 1\n", "b = 2\n"], [], ["c = 3\n"], "3.11", ["attrs 26"]).digest != corpus.digest


def test_the_smallest_recipe_keeps_every_cycle_and_stage():
    small = smallest(TARGET)
    names = [[stage.name for stage in cycle.stages] for cycle in small.cycles]
    assert names == [[stage.name for stage in cycle.stages] for cycle in TARGET.cycles]
    assert evolve(small, cycles=(), geometry=TARGET.geometry, questions=TARGET.questions).cycles == ()
