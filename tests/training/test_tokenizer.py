"""The tokenizer keeps every text, gives digits tokens of their own and knows its control tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.examples import count_examples
from tests.training.conftest import DEMO
from training import tokenizer as training
from training.chat_format import CONTROLS, HIDDEN, SHOWN
from training.corpus import assemble
from training.tasks import copy_text, table_lookup

SHIPPED = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@given(st.text())
@settings(max_examples=count_examples(80), deadline=None)
def test_any_text_comes_back(text):
    assert SHIPPED.decode(SHIPPED.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own():
    assert SHIPPED.encode("pi = 31415").tokens[-5:] == list("31415")


def test_control_tokens_are_the_first_ids_and_only_the_hidden_are_left_out_when_decoding():
    ids = [SHIPPED.token_to_id(control) for control in CONTROLS]
    assert ids == list(range(len(CONTROLS)))
    shown = SHIPPED.decode(ids, skip_special_tokens=True)
    assert all(control in shown for control in SHOWN)
    assert not any(control in shown for control in HIDDEN)


def test_training_a_tokenizer_twice_gives_the_same(source, monkeypatch):
    monkeypatch.setattr(training, "VOCABULARY", 400)
    monkeypatch.setattr(training, "SAMPLES", 50)
    nothing = dict.fromkeys(("held_out", "held_out_packages", "apart", "packages", "packages_apart"), ())
    corpus = assemble(train=source.texts, python="3", **nothing)
    made = [training.train_tokenizer(corpus, (table_lookup, copy_text)).to_str() for _ in range(2)]
    assert made[0] == made[1]
    assert len(json.loads(made[0])["model"]["vocab"]) == pytest.approx(400, abs=1)
