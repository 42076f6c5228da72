"""Text that looks like a control token is text; ids come from the checkpoint's own files."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.text.model_text import Text
from adapters.text.template import ControlToken
from adapters.text.tokenizer import (
    Tokenizer,
    TokenizerPanicked,
    build_tokenizer,
    is_independent_of,
    remove_added_tokens,
)
from adapters.text.tokenizer_backend import build_backend
from effects.job import Sampling
from tests.examples import count_examples
from tests.text import small

TYPED = st.lists(st.text(max_size=8) | st.sampled_from([*small.SPECIAL, *small.VISIBLE, "\0", "\u202e"]), max_size=8)


@settings(max_examples=count_examples(300), deadline=None)
@given(parts=TYPED)
def test_no_text_becomes_a_control_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    controls = {control.id for control in tokenizer.controls.values()}
    (tokens,) = tokenizer.encode_now(["".join(parts)])
    assert controls.isdisjoint(tokens)


DESCRIBED = (json.loads(small.train().to_str()), json.loads((demo.FOLDER / "tokenizer.json").read_text()))
FORGOTTEN = [remove_added_tokens(one, {token["content"] for token in one["added_tokens"]}) for one in DESCRIBED]
SHARED, READ = [build_tokenizer(one, {}) for one in DESCRIBED], [build_backend(one) for one in FORGOTTEN]


@settings(max_examples=count_examples(300), deadline=None)
@given(parts=TYPED, number=st.integers(0, 1))
def test_a_shared_model_encodes_as_one_that_never_heard_of_control_tokens(parts: list[str], number: int) -> None:
    assert is_independent_of(DESCRIBED[number], {token["content"] for token in DESCRIBED[number]["added_tokens"]})
    text = "".join(parts)
    (tokens,) = SHARED[number].encode_now([text])
    assert list(tokens) == READ[number].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ignore_merges", True),
        ("unk_token", "<unk>"),
        ("continuing_subword_prefix", "##"),
        ("end_of_word_suffix", "</w>"),
        ("type", "Unigram"),
        ("merges", None),
    ],
)
def test_a_model_that_finds_tokens_in_another_way_is_not_shared(setting: str, value: object) -> None:
    [described, _] = DESCRIBED
    model = {**described["model"], setting: value}
    assert not is_independent_of({**described, "model": model}, set(small.SPECIAL))


def test_a_control_token_of_one_character_and_white_space_that_is_one_are_not_shared() -> None:
    [described, _] = DESCRIBED
    assert not is_independent_of(described, {*small.SPECIAL, *small.VISIBLE, "a"})
    model = {**described["model"], "vocab": {**described["model"]["vocab"], "<0x0A>": 999}, "byte_fallback": True}
    assert not is_independent_of({**described, "model": model}, {*small.SPECIAL, *small.VISIBLE, "<0x0A>"})
    added = [*described["added_tokens"], {**described["added_tokens"][0], "content": "   ", "id": 999}]
    assert not is_independent_of({**described, "added_tokens": added}, {*small.SPECIAL, *small.VISIBLE})


@settings(max_examples=count_examples(200), deadline=None)
@given(text=st.text("abc <tool_callh>|im\n", max_size=40))
def test_text_without_control_tokens_has_the_ids_of_the_full_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    if not any(content in text for content in tokenizer.controls):
        assert tokenizer.encode_now([text]) == tokenizer.encode_now([text], controls=True)


def test_the_text_of_a_control_token_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    (tokens,) = tokenizer.encode_now(["<|im_start|>user <tool_call>"])
    assert tokenizer.decode(tokens) == "<|im_start|>user <tool_call>"


def test_control_tokens_can_be_asked_for(tokenizer: Tokenizer) -> None:
    (tokens,) = tokenizer.encode_now(["<|im_start|>user <tool_call>"], controls=True)
    assert tokens[0] == 1
    assert tokens[-1] == tokenizer.controls["<tool_call>"].id
    assert tokenizer.decode(tokens) == "user <tool_call>"
    assert tokenizer.decode(tokens, special=True) == "<|im_start|>user <tool_call>"


async def test_a_control_token_may_swallow_the_white_space_beside_it(tokenizer: Tokenizer) -> None:
    greedy = ControlToken("<x>", 3, lstrip=True, rstrip=True)
    rendered = ("a \n", greedy, "\n b ")
    (a,), (b,) = tokenizer.encode_now(["a"])[0], tokenizer.encode_now(["b"])[0]
    assert (await tokenizer.encode_rendered(rendered))[:3] == (a, 3, b)


def test_what_ends_an_answer_is_read_from_every_file_that_says_so(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_tokens == (2, 0)
    assert tokenizer.variables == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


async def test_encoding_a_long_prompt_does_not_hold_up_the_event_loop(tokenizer: Tokenizer) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await anyio.sleep(0.005)
            turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        (tokens,) = await tokenizer.encode(["The quick brown fox " * 50_000])
        tasks.cancel_scope.cancel()
    assert len(tokens) > 100_000
    assert turns > 5, "with encode() on this text it is one, after a second"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "tokenizer.json: not valid JSON"),
        ("tokenizer.json", "[]", "tokenizer.json: not a JSON object"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}, "model": {}}', "tokenizer.json cannot be read"),
        (
            "tokenizer.json",
            '{"decoder": {"type": "Metaspace"}, "model": {}}',
            "its decoder is not served; accepted: By",
        ),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template"),
        ("generation_config.json", '{"do_sample": true, "top_p": 7}', r"top_p is 7, not a number in \[1e-06, 1\]"),
        ("generation_config.json", '{"do_sample": "yes"}', "do_sample is 'yes', not true or false"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', "eos_token_id -1 is not a token id in 0"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id True is not a token id in 0"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str | None, says: str) -> None:
    small.write(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=says):
        Text.load(tmp_path)


def test_a_tokenizer_of_millions_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    small.write(tmp_path)
    entries = b",".join(b'"%x":%d' % (n, n) for n in range(2_200_000))
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b'{"model": {"vocab": {' + entries + b"}}}")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="more than 2097152 texts"):
        Text.load(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2 * file.stat().st_size, "read, and no more"
    tracemalloc.stop()


PANICS = "(a+a+)+[b-y]"  # for ever on many an `a`, so that the library gives up with what is no Exception


def with_expression(expression: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    raw = json.loads((demo.FOLDER / "tokenizer.json").read_text())
    return {**raw, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, plain]}}


def test_an_expression_without_end_is_refused_at_start() -> None:
    with pytest.raises(CheckpointError, match="the tokenizer gave up"):
        build_tokenizer(with_expression(PANICS), {})


def test_an_expression_that_is_found_out_later_fails_the_request_and_nothing_else() -> None:
    tokenizer = build_tokenizer(with_expression("(q+q+)+[r-y]"), {})
    with pytest.raises(TokenizerPanicked):
        tokenizer.encode_now(["q" * 300 + "!"])
    assert tokenizer.encode_now(["Hello"])[0]


def test_a_tokenizer_with_a_merge_that_makes_a_control_token_is_still_read(tmp_path: Path) -> None:
    small.write(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["added_tokens"][0]["content"] = next(
        "".join(merge) for merge in described["model"]["merges"] if "".join(merge).isalpha()
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert Tokenizer.load(tmp_path).encode_now(["the"])


SETTINGS: list[tuple[dict[str, object], Sampling]] = [
    ({}, Sampling(temperature=1)),
    ({"do_sample": True}, Sampling(temperature=1)),
    ({"temperature": 0.6, "top_k": 20}, Sampling(temperature=0.6, top_k=20)),
    ({"do_sample": True, "top_p": 0.95, "top_k": -1, "min_p": 0.1}, Sampling(temperature=1, top_p=0.95, min_p=0.1)),
    ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, Sampling(repetition_penalty=1.1)),
]


@pytest.mark.parametrize(("said", "expected"), SETTINGS, ids=str)
def test_sampling_is_what_generation_config_says_and_openais_where_it_is_silent(
    tmp_path: Path, said: dict[str, object], expected: Sampling
) -> None:
    assert Text.load(small.write(tmp_path, **said)).sampling == expected


def test_the_size_is_one_more_than_the_largest_id(tokenizer: Tokenizer) -> None:
    """This holds whatever ids are missing below it, and whatever ids a file claims for added tokens."""
    found: dict[str, Any] = json.loads(small.train().to_str())
    vocabulary = found["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    sparse = {**found, "model": {**found["model"], "vocab": {**vocabulary, last: 5000}, "merges": []}}
    claimed = {**found, "added_tokens": [{**found["added_tokens"][0], "content": "<new>", "id": 70000}]}
    assert tokenizer.size == size_by_list(tokenizer)
    for one in (found, sparse, claimed):
        made = build_tokenizer(one, {})
        assert made.size == size_by_list(made)


def size_by_list(tokenizer: Tokenizer) -> int:
    return 1 + max(tokenizer.full.get_vocab(with_added_tokens=True).values())
