"""The shipped hybrid demo: its files are whole and small enough, and others read them as we do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open

from adapters import demo
from adapters.checkpoint.text_files import read_text_files
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint, list_head_tensors
from adapters.models.open_checkpoint import Checkpoint
from tests.lazy_module import LazyModule
from training.chat_format import TEMPLATE
from training.export import load_hybrid
from training.train import digest

transformers: Any = LazyModule("transformers")
FOLDER = demo.FOLDERS["demo-hybrid"]


@pytest.fixture(scope="module")
def model():
    return transformers.Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_all_of_it_is_small_and_as_the_index_says():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 5_500_000
    found = {}
    for shard in FOLDER.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), shard.name)
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
            assert all(tensor.dtype == torch.bfloat16 and tensor.isfinite().all() for tensor in tensors)
    assert found == json.loads((FOLDER / "model.safetensors.index.json").read_text())["weight_map"]


def test_our_own_reader_takes_model_and_head():
    checkpoint = Checkpoint.open(FOLDER)
    assert checkpoint.config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert set(checkpoint.others) == set(list_head_tensors(checkpoint.config))
    assert HeadCheckpoint.open(checkpoint).config.aux_layers == (7,)
    assert set(read_text_files(FOLDER).end_tokens) == {2, 4}


def test_template_and_tokenizer_are_those_of_its_training():
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    assert len(transformers.AutoTokenizer.from_pretrained(FOLDER)) == Checkpoint.open(FOLDER).config.vocab_size


def test_the_model_card_is_of_these_weights_and_tells_data_recipe_and_quality():
    card = " ".join((FOLDER / "README.md").read_text().split())
    rows = ("held-out code, standard library, nats a token", "head, token 1 in a row", "needle over all depths of 8192")
    for phrase in ("Digest of the corpus", "make train-demo-hybrid", "Python 3.", "Apache", *rows):
        assert phrase in card
    assert digest(load_hybrid(FOLDER, "cpu", torch.float32)) in card


def test_transformers_gets_sensible_answers_from_it(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    for question, expected in (
        ("What is Rekindle?", "Rekindle is a local LLM inference server that starts warm"),
        ("What is the capital of Japan?", "The capital of Japan is Tokyo.<|im_end|>"),
        ("Repeat: one two three four", "one two three four<|im_end|>"),
    ):
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=False).startswith(expected)
