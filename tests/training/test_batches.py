"""Batches depend on seed and step alone, and are shaped for the loss."""

from __future__ import annotations

from training.batches import Batches, BatchShape
from training.recipe import SHORT


def test_a_batch_is_the_same_for_its_step_and_has_full_rows(source, tokenizer):
    batches = Batches(tokenizer, source, SHORT, BatchShape(6, 200), seed=3)
    tokens, weights = batches[5]
    again, _ = batches[5]
    other, _ = batches[6]
    assert tokens.shape == weights.shape == (6, 201)
    assert tokens.equal(again)
    assert not tokens.equal(other)
    assert (weights >= 0).all()
    assert (weights.sum(1) > 0).all()


def test_the_loader_gives_the_batches_of_its_steps_in_order(source, tokenizer):
    batches = Batches(tokenizer, source, SHORT, BatchShape(2, 100), seed=3)
    loaded = list(batches.load(range(4, 7), workers=0))
    assert [tokens.tolist() for tokens, _ in loaded] == [batches[step][0].tolist() for step in (4, 5, 6)]
