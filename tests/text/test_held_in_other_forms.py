"""Tests of which calls a constrained answer may have, in the forms of Mistral's models, GLM, MiniMax and Seed-OSS."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import join_blocks
from adapters.text.answer.whole_answer_grammar import build_answer_grammar
from adapters.text.conversation import FunctionTool, ToolCall, ToolChoice
from adapters.text.grammars.grammar import Grammars
from adapters.text.tokenizer import Tokenizer
from tests.text import small
from tests.text.test_held import allowed

TOKENS = (
    *(
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "[THINK]",
        "[/THINK]",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
)
ADD = FunctionTool(
    "add",
    None,
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "integer", "maximum": 5}, "unit": {"enum": ["C"]}},
        "required": ["path", "n"],
        "additionalProperties": False,
    },
    strict=True,
)
LOOK = FunctionTool("look", None, {"type": "object"})
TOOLS = {"add": ADD, "look": LOOK}


def write_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def as_mistral(name: str, **values: Any) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}"


def as_mistral_json(name: str, **values: Any) -> str:
    return f"[TOOL_CALLS][{json.dumps({'name': name, 'arguments': values})}]"


def as_glm(name: str, **values: Any) -> str:
    parts = (f"<arg_key>{key}</arg_key>\n<arg_value>{write_text(one)}</arg_value>\n" for key, one in values.items())
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


def as_seed(name: str, **values: Any) -> str:
    parts = (f"<parameter={key}>{write_text(one)}</parameter>\n" for key, one in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</seed:tool_call>"


def as_minimax(name: str, **values: Any) -> str:
    parts = (f'<parameter name="{key}">{write_text(one)}</parameter>\n' for key, one in values.items())
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{"".join(parts)}</invoke>\n</minimax:tool_call>'


FORMS: dict[str, Callable[..., str]] = {
    "mistral": as_mistral,
    "mistral-json": as_mistral_json,
    "glm-xml": as_glm,
    "seed-xml": as_seed,
    "minimax-xml": as_minimax,
}
BETWEEN = {"mistral": "", "glm-xml": "\n", "seed-xml": "\n"}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens of their own", "plain text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = small.write(tmp_path_factory.mktemp("small"))
    if request.param:
        trained = small.train()
        trained.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS])
        trained.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(Path(folder))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def is_allowed(grammars: Grammars, tokenizer: Tokenizer, reader: AnswerReader, text: str) -> bool:
    grammar = build_answer_grammar(reader, None, tokenizer.controls)
    assert grammar is not None
    (tokens,) = tokenizer.encode_now([text], controls=True)
    matching = grammars.match(grammar)
    for token in (*tokens, tokenizer.end_tokens[0]):
        if not allowed(matching, token):
            return False
        matching.append((token,))
    return True


@pytest.mark.parametrize("form", FORMS)
def test_required_calls_are_those_that_the_template_writes(grammars: Grammars, tokenizer: Tokenizer, form: str) -> None:
    reader = AnswerReader(calls=form, tools=TOOLS, choice=ToolChoice("required"))
    write = FORMS[form]
    values = {"path": "a\n<b> [x", "n": 5, "unit": "C"}
    good = [write("add", **values), write("add", path="", n=-1), write("look"), write("look", any="1 < 2")]
    bad = ["", "Hm.", write("add", path="a"), write("add", path="a", n=6), write("other"), write("add", n=1, path="a")]
    bad += [write("add", path="a", n=1, unit="F"), good[0] + " ok"]
    if form in BETWEEN:
        good.append(f"{good[0]}{BETWEEN[form]}{good[2]}")
    if form.startswith("mistral"):  # the order of members is free in JSON
        bad.remove(write("add", n=1, path="a"))
    for text in (*good, *bad):
        assert is_allowed(grammars, tokenizer, reader, text) == (text in good), text
    for text in good[:1]:
        parser = reader.start_parser()
        (found,) = join_blocks([*parser.push(text), *parser.finish()])
        assert isinstance(found, ToolCall)
        assert json.loads(found.arguments) == values


def test_the_id_of_a_call_may_be_written_where_it_has_a_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    reader = AnswerReader(calls="mistral", tools=TOOLS, choice=ToolChoice("required"))
    call = as_mistral("look", any=1)
    named = call.replace("[ARGS]", "[CALL_ID]aB3456789[ARGS]")
    assert is_allowed(grammars, tokenizer, reader, named) == ("[CALL_ID]" in tokenizer.controls)
    assert not is_allowed(grammars, tokenizer, reader, named.replace("aB3456789", "a"))
    parser = reader.start_parser(lambda: "ours")
    (found,) = join_blocks([*parser.push(named), *parser.finish()])
    assert found == ToolCall("ours", "look", '{"any": 1}')


def test_a_list_of_calls_may_hold_several(grammars: Grammars, tokenizer: Tokenizer) -> None:
    reader = AnswerReader(calls="mistral-json", tools=TOOLS, choice=ToolChoice("required"))
    calls = [{"name": "look", "arguments": {}}, {"name": "add", "arguments": {"path": "]", "n": 1}}]
    text = f"[TOOL_CALLS]{json.dumps(calls)}"
    assert is_allowed(grammars, tokenizer, reader, text)
    assert not is_allowed(grammars, tokenizer, reader, text[:-1])
    parser = reader.start_parser()
    found = join_blocks([*parser.push(text), *parser.finish()])
    assert [one.name for one in found if isinstance(one, ToolCall)] == ["look", "add"]


@pytest.mark.parametrize("form", FORMS)
def test_strict_calls_may_follow_text_and_nothing_else_is_a_call(
    grammars: Grammars, tokenizer: Tokenizer, form: str
) -> None:
    reader = AnswerReader(calls=form, tools=TOOLS, reasoning="mistral" if form.startswith("mistral") else "think")
    write = FORMS[form]
    call = write("add", path="a", n=1)
    thought = "[THINK]so[/THINK]" if form.startswith("mistral") else "<think>so</think>\n"
    for text in ("", "Text.", f"Text.\n{call}", call, f"{thought}{call}"):
        assert is_allowed(grammars, tokenizer, reader, text), text
    for text in (write("add", path="a", n=9), f"Text.\n{write('add', path='a')}"):
        assert not is_allowed(grammars, tokenizer, reader, text), text
