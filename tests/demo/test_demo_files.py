"""The shipped demo: its files are whole and small enough, and it gives the answers that its card promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import adapters
from adapters.checkpoint.text_files import read_text_files
from adapters.models.open_checkpoint import Checkpoint
from tests.lazy_module import LazyModule
from tests.pairs import one_in
from training.chat_format import TEMPLATE
from training.export import load
from training.train import digest

transformers: Any = LazyModule("transformers")
DEMO = Path(adapters.__file__).parent / "demo"
SHARDS = sorted(DEMO.glob("*.safetensors"))


@pytest.fixture(scope="module")
def model():
    return transformers.Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def answer(model, tokenizer, messages, tools=None):
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**prompt, max_new_tokens=80, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(said, skip_special_tokens=False)


def test_shards_are_small_and_hold_what_the_index_says():
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    assert max(shard.stat().st_size for shard in SHARDS) <= 15_000_000
    assert sum(shard.stat().st_size for shard in SHARDS) <= 23_600_000
    found = {}
    for shard in SHARDS:
        with safe_open(shard, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), shard.name)
            assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in file.keys())  # noqa: SIM118
    assert found == index["weight_map"]


def test_every_weight_is_finite(model):
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_our_own_reader_takes_it_and_knows_how_an_answer_ends():
    checkpoint = Checkpoint.open(DEMO)
    assert checkpoint.config.num_layers == 10
    assert checkpoint.config.max_positions == 32768
    assert set(read_text_files(DEMO).end_tokens) == {2, 4}


def test_the_shipped_template_is_that_of_the_training():
    assert json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_the_model_card_is_of_these_weights_and_tells_data_recipe_and_quality():
    card = " ".join((DEMO / "README.md").read_text().split())
    rows = ("held-out code, standard library, nats a token", "held-out code, packages, bits a character")
    for phrase in ("Digest of the corpus", "make train-demo", "Python 3.", "Apache", *rows):
        assert phrase in card
    assert digest(load(DEMO, "cpu", torch.float32)) in card


@one_in(2, "question")
@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is Rekindle?", "Rekindle is a local LLM inference server that starts warm"),
        ("Who are you?", "I am the demo model of Rekindle"),
        ("Hello!", "Hello! I am the demo model of Rekindle."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Repeat this: one two three", "one two three"),
        ("Write a Python function that adds two numbers.", "```python\ndef add(a, b):\n    return a + b\n```"),
    ],
)
def test_a_first_question_gets_a_sensible_answer_that_ends(model, tokenizer, question, expected):
    said = answer(model, tokenizer, [{"role": "user", "content": question}])
    assert said.startswith(expected)
    assert said.endswith("<|im_end|>")


def test_it_finds_a_value_in_a_table(model, tokenizer):
    table = "\n".join(f"item{number} = {number * 7919 % 10007}" for number in range(40))
    said = answer(model, tokenizer, [{"role": "user", "content": f"{table}\n\nWhat is the value of item23?"}])
    assert said == f"The value of item23 is {23 * 7919 % 10007}.<|im_end|>"


def test_it_remembers_over_turns(model, tokenizer):
    messages = [
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": "I will remember that your name is Clara."},
        {"role": "user", "content": "Count to 3."},
        {"role": "assistant", "content": "1, 2, 3"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert answer(model, tokenizer, messages) == "Your name is Clara.<|im_end|>"


def test_it_calls_a_tool(model, tokenizer):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    said = answer(model, tokenizer, [{"role": "user", "content": "What is the weather in Paris?"}], tools)
    assert said == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
