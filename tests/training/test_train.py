"""A tiny run of the whole pipeline: the loss falls, the export loads elsewhere with the same numbers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.lazy_module import LazyModule
from training import draft, evaluate
from training.agents import ToolLoop
from training.batches import Batches, BatchShape
from training.chat_format import CONTROLS
from training.corpus import Corpus, assemble
from training.demo import run
from training.dialogues import chat
from training.draft import Folders, shrink_draft_recipe
from training.evaluate import Exam, Papers, examine, talk
from training.export import export, load
from training.model import UNUSED_IDS, Geometry, Qwen3
from training.recipe import TARGET, shrink_recipe
from training.staging import DemoLimits
from training.tasks import code, continue_code
from training.train import LearningRates, Stage, TrainingProgress, digest, schedule, train
from training.words import Source

transformers: Any = LazyModule("transformers")
TINY = Geometry(hidden=64, inner=96, layers=2, heads=2, head_dim=32, context=256)
VERSIONS = {"python": "3.11", "packages": ["cattrs 26"], "packages_apart": ["attrs 26"]}
RATES = LearningRates(matrices=1e-2, others=1e-2, falling=0.5)


@pytest.fixture
def small_run(source, tokenizer):
    def batches(stage, seed):
        return Batches(tokenizer, source, stage.mixture, stage.shape, seed)

    def run(steps):
        torch.manual_seed(0)
        model = Qwen3(TINY)
        stage = Stage("small", BatchShape(4, 127), {chat: 1.0}, steps=steps, share=1.0, whole=0.3)
        before = model(*batches(stage, 1)[1000]).item()
        progress = train(model, batches, [stage], rates=RATES, seed=1)
        after = model(*batches(stage, 1)[1000]).item()
        return model, progress, before, after

    return run


def test_the_loss_falls(small_run):
    _, progress, before, after = small_run(24)
    assert progress.steps == {"small": 24}
    assert after < before - 0.5


@pytest.mark.long
def test_the_same_seed_gives_the_same_parameters(small_run):
    first, second = (small_run(5)[0] for _ in range(2))
    assert digest(first) == digest(second)


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
        ours = loaded.logits(loaded.compute_hidden(tokens))
        theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.isin(ours.argmax(-1), torch.tensor(UNUSED_IDS)).any()
    assert (ours[..., list(UNUSED_IDS)].amax(-1) < ours.amax(-1)).all()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())


def test_exams_and_talks_run_on_an_untrained_model(source, tokenizer):
    model = Qwen3(evolve(TINY, context=1024))
    every = [Exam("chat", chat, 256, 4), Exam("loop", ToolLoop(steps=2), 768, 3, whole=True)]
    papers = Papers.of(tokenizer, source, every).load(0)
    score, loops = (examine(model, exam, papers) for exam in every)
    assert score.answers >= score.documents >= 1
    assert 0 <= score.exact <= 1
    assert loops.answers == 3 * loops.documents > 0
    assert next(papers, None) is None
    assert len(talk(model, tokenizer, ["Hello", "Who are you?"], 5)) == 2


def test_the_rate_rises_stays_and_falls():
    assert schedule(0, 0.0, 0.5) == 0.01
    assert schedule(500, 0.3, 0.5) == 1.0
    assert schedule(500, 0.75, 0.5) == pytest.approx(0.5)
    assert schedule(500, 1.0, 0.5) == 0.01


def test_a_corpus_comes_back_from_its_file_with_its_digest(tmp_path):
    texts = {"train": ["a = 1\n"], "held_out": ["b = 2\n"], "held_out_packages": ["c = 3\n"], "apart": ["d = 4\n"]}
    corpus = assemble(**texts, **VERSIONS)
    corpus.save(tmp_path / "corpus")
    assert Corpus.load(tmp_path / "corpus") == corpus
    texts |= {"train": ["a = 1\n", "b = 2\n"], "held_out": []}
    assert assemble(**texts, **VERSIONS).digest != corpus.digest


def test_the_smallest_recipe_keeps_every_stage():
    small = shrink_recipe(TARGET)
    assert [stage.name for stage in small.stages] == [stage.name for stage in TARGET.stages]
    assert [cycle.rates for cycle in small.cycles] == [cycle.rates for cycle in TARGET.cycles]


def test_code_that_spells_control_tokens_trains_with_finite_losses_and_anything_else_ends_the_run(source, tokenizer):
    spelling = Source(tuple(f"{text}\nSPELT = {CONTROLS!r}\n" for text in source.texts for _ in range(3)))
    short = Source(tuple(f"SPELT = {control!r}  # as in {CONTROLS}\n" * 20 for control in CONTROLS))
    mixtures = {code: 0.5, continue_code: 0.5}
    stage = Stage("spelt", BatchShape(4, 127), mixtures, steps=6, share=1.0, whole=0.3)
    for texts in (spelling, short):

        def batches(stage, seed, texts=texts):
            return Batches(tokenizer, texts, stage.mixture, stage.shape, seed)

        torch.manual_seed(0)
        progress = train(Qwen3(TINY), batches, [stage], rates=RATES, seed=1)
        assert math.isfinite(progress.loss)
    assert any(set(UNUSED_IDS) & set(ids.flatten().tolist()) for ids, _ in batches(stage, 1).load(range(6), 0))


class Untaught(Qwen3):
    """The loss as it was: an id that is out of the softmax may be a label."""

    def forward(self, tokens, weights):
        scores = self.logits(self.compute_hidden(tokens[:, :-1].long())) + self.unused
        losses = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), tokens[:, 1:].long().flatten(), reduction="none"
        )
        return (losses * weights[:, 1:].float().flatten()).sum() / weights.sum()


def test_a_loss_that_is_not_finite_ends_the_run(tokenizer):
    texts = Source(("SPELT = " + repr(CONTROLS) + "\n",) * 9)
    stage = Stage("spelt", BatchShape(4, 127), {code: 1.0}, steps=6, share=1.0, whole=0.3)
    with pytest.raises(FloatingPointError, match="spelt step 0: a loss is not finite"):
        train(
            Untaught(TINY),
            lambda stage, seed: Batches(tokenizer, texts, stage.mixture, stage.shape, seed),
            [stage],
            rates=RATES,
            seed=1,
        )


def test_a_run_goes_on_with_the_stage_that_it_is_told(source, tokenizer, tmp_path):
    stages = [Stage(name, BatchShape(2, 63), {chat: 1.0}, steps=3, share=0.5, whole=0.3) for name in ("one", "two")]

    def batches(stage, seed):
        return Batches(tokenizer, source, stage.mixture, stage.shape, seed)

    notes, model, seen = tmp_path / "notes", Qwen3(TINY), []
    train(model, batches, stages[:1], rates=RATES, seed=1, after=lambda progress: progress.save(notes))
    before = TrainingProgress.load(notes)
    assert before.steps == {"one": 3}
    progress = train(model, batches, stages, rates=RATES, seed=1, after=seen.append, first=1, before=before)
    assert seen == [progress]
    assert progress.steps == {"one": 3, "two": 3}
    assert progress.tokens == 2 * before.tokens
    assert progress.seconds > before.seconds
    assert train(model, batches, stages, rates=RATES, seed=1, first=2, before=progress) == progress


@pytest.mark.timeout(240)
@pytest.mark.long
def test_all_of_it_runs_small_and_is_taken_up_again(source, tokenizer, tmp_path, capsys, monkeypatch):
    """Target and draft as `make train-demo` makes them, from a corpus and a tokenizer that lie there."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    texts = dict.fromkeys(("train", "held_out", "held_out_packages", "apart"), source.texts)
    assemble(**texts, **VERSIONS).save(work / "corpus.json.xz")
    tokenizer.save(str(work / "tokenizer.json"))
    monkeypatch.setattr(evaluate, "ABOUT", evaluate.ABOUT[:1])  # a decoding without a cache takes its time
    monkeypatch.setattr(evaluate, "SMALL_TALK", ())
    monkeypatch.setattr(evaluate, "STRANGE_PROMPTS", evaluate.STRANGE_PROMPTS[:1])
    monkeypatch.setattr(draft, "BLOCKS", (4,))
    folders = Folders(out, out / "draft", work)
    before = evolve(shrink_recipe(TARGET), cycles=shrink_recipe(TARGET).cycles[:1])
    run(before, work, out, DemoLimits(math.inf, 0, 0))
    draft.run(shrink_draft_recipe(draft.DRAFT), folders, draft.DraftLimits(math.inf, 0, 0))
    run(shrink_recipe(TARGET), work, out, DemoLimits(math.inf, 0, 2))
    for first in (0, 1):
        draft.run(shrink_draft_recipe(draft.AGAIN), folders, draft.DraftLimits(math.inf, 0, first, again=True))
    assert "training took" in capsys.readouterr().out
    card, small = " ".join((out / "README.md").read_text().split()), shrink_recipe(TARGET)
    assert f"3 steps of 2 windows of {small.stages[0].shape.length} tokens" in card
    assert "attrs 26" in card
    assert "held-out code, other authors, nats a token" in card
    assert digest(load(out, "cpu", torch.float32)) in (out / "draft" / "README.md").read_text()
