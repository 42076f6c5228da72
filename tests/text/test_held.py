"""Whole answers: what each form, choice and way of thinking lets a model say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from attrs import evolve

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import join_blocks
from adapters.text.answer.schema_types import MAX_SCHEMAS_READ, collect_types
from adapters.text.answer.whole_answer_grammar import build_answer_grammar
from adapters.text.conversation import FunctionTool, ToolCall, ToolChoice
from adapters.text.grammars.grammar import GrammarRefused, Grammars, build_json_grammar
from adapters.text.tokenizer import Tokenizer
from effects.grammar import Grammar
from tests.text import small

SCHEMA = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/n"}},
    "required": ["n"],
    "$defs": {"n": {"maximum": 9}},
}
SCHEMA["$defs"]["n"]["type"] = "integer"  # type: ignore[index]
ADD = FunctionTool("add", None, SCHEMA, strict=True)
LOOK = FunctionTool("look", None, {"type": "object", "uniqueItems": "nothing that could be held"})
TOOLS: Mapping[str, FunctionTool] = {"add": ADD, "look": LOOK}
FORM = build_json_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADDED, LOOKED = call("add", '{"n": 4}'), call("look", '{"any": [1, "thing"]}')
TOO_MUCH = call("add", '{"n": 10}')
THOUGHT = "<think>\nLet me see. {\n</think>\n\n"
HERMES: dict[str, Any] = {"calls": "hermes", "tools": TOOLS}
REQUIRED = AnswerReader(**HERMES, choice=ToolChoice("required"))
NAMED = AnswerReader(**HERMES, choice=ToolChoice("function", "add"))
ALLOWED = AnswerReader(**HERMES, choice=ToolChoice(allowed_names=("look",)))
ONE_OF = AnswerReader(**HERMES, choice=ToolChoice("required", allowed_names=("look",)))
ONE = AnswerReader(**HERMES, choice=ToolChoice("required"), parallel=False)
AUTO = AnswerReader(**HERMES)
THINKS = AnswerReader(reasoning="think")
OPENED = AnswerReader(reasoning="think", starts_in_reasoning=True)
BARE = AnswerReader(calls="llama3-json", tools=TOOLS, choice=ToolChoice("required"))
REGEX = Grammar("regex", "a/b")
TYPED = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": ["integer", "null"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["path", "n"],
}
XML = AnswerReader(
    calls="qwen-xml",
    tools={"add": FunctionTool("add", None, TYPED, strict=True), "look": LOOK},
    choice=ToolChoice("required"),
)


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


PUT = FunctionTool(
    "put",
    None,
    {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
            "at": {"$ref": "#/$defs/at"},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
            "note": {"type": "string", "pattern": "^a/"},
            "few": {"type": "string", "maxLength": 3},
            "sure": {"type": "boolean"},
        },
        "required": ["id", "at", "unit"],
        "additionalProperties": False,
        "$defs": {
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    strict=True,
)
PYTHON = AnswerReader(calls="pythonic", tools=TOOLS, choice=ToolChoice("required"))
GEMMA = AnswerReader(calls="gemma4", tools=TOOLS, choice=ToolChoice("required"))


def gemma(name: str, written: str) -> str:
    return f"<|tool_call>call:{name}{{{written}}}<tool_call|>"


XML_ADDED, XML_LOOKED = xml("add", path="a\n</par b", n="5"), xml("look", anything="1 < 2")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small.write(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


CASES: dict[str, tuple[AnswerReader, Grammar | None, tuple[str, ...], tuple[str, ...]]] = {
    "required": (REQUIRED, None, (ADDED, LOOKED, f"{ADDED}\n{LOOKED}"), ("", "Hm.", TOO_MUCH, f"{ADDED} ok")),
    "one": (ONE, None, (ADDED,), (f"{ADDED}\n{LOOKED}",)),
    "allowed": (ALLOWED, None, ("Text.", LOOKED, f"Text. {LOOKED}"), (ADDED, f"{LOOKED}\n{ADDED}")),
    "one of those allowed": (ONE_OF, None, (LOOKED,), ("Text.", ADDED)),
    "named": (NAMED, None, (ADDED, f"{ADDED}\n{ADDED}"), (LOOKED, "{}")),
    "strict": (AUTO, None, ("", "Hm. {", ADDED, f"Look:\n{LOOKED}\n{ADDED}"), (TOO_MUCH, f"{ADDED} ok")),
    "strict, without tags": (
        AUTO,
        None,
        ('{"name": "Ann"}', "```json\n{}\n```", '[{"a": 1}]', 'So: {"name": "add"}'),
        (
            '{"name": "add", "arguments": {"n": 10}}',
            "{name: 'add', arguments: {n: 10}}",
            'So:\n```json\n{"name": "add", "arguments": {"n": 10}}\n```',
            'So:\n[{"type": "function", "function": {"name": "add", "arguments": {"n": 10}}}]',
        ),
    ),
    "form": (AnswerReader(), FORM, ("{}", '{"a": true}', '{\n    "a": false\n}'), ("", '{"a": 1}', "{} ")),
    "form or calls": (AUTO, FORM, ("{}", ADDED), ("Hm.", TOO_MUCH)),
    "form, may think": (THINKS, FORM, ("{}", f"{THOUGHT}{{}}"), (THOUGHT, "Hm. {}")),
    "form, thinks": (OPENED, FORM, (f"{THOUGHT[8:]}{{}}",), ("{}",)),
    "regex": (AnswerReader(), REGEX, ("a/b",), ("ab",)),
    "regex, may think": (THINKS, REGEX, ("a/b", f"{THOUGHT}a/b"), ("ab",)),
    "regex with a backslash": (THINKS, Grammar("regex", r"a\\/b"), ("a\\/b",), ("a/b",)),
    "rules": (OPENED, Grammar("lark", 'start: "x"+'), ("x", "xxx"), (THOUGHT, "")),
    "xml": (
        XML,
        None,
        (XML_ADDED, XML_LOOKED, f"{XML_ADDED}\n{XML_LOOKED}", xml("add", path="", n="null", unit="C"), xml("look")),
        (
            "",
            xml("add", path="a"),
            xml("add", n="1"),
            xml("add", path="a", n="x"),
            xml("other"),
            ADDED,
            xml("add", path="a", n="1", unit="K"),
            xml("add", path="a", n="1", more="x"),
        ),
    ),
    "xml, strict": (
        evolve(XML, choice=ToolChoice()),
        None,
        ("Hm.", "a </parameter> b", XML_ADDED, f"Look:\n{XML_LOOKED}", xml("look", any="a</parameter>b")),
        (xml("add", path="a"), f"Look: {xml('add', path='a', n='x')}", "<function=add>\n", f"{XML_ADDED} ok"),
    ),
    "xml, values": (
        evolve(XML, tools={"put": PUT}),
        None,
        (
            xml("put", id="ab1", at='{"x": 4}', unit="null"),
            xml("put", id="ab1", at='{\n  "x": 4\n}', unit="C", note="a/b", few="a\nb"),
        ),
        (
            xml("put", id="ab", at='{"x": 4}', unit="C"),
            xml("put", id="ab1", at='{"x": 10}', unit="C"),
            xml("put", id="ab1", at='{"x": 4}', unit="K"),
            xml("put", id="ab1", at='{"x": 4}', unit="C", note="b/a"),
            xml("put", id="ab1", at='{"x": 4}', unit="C", few="abcd"),
            xml("put", id="ab1</parameter>\n</function>", at='{"x": 4}', unit="C"),
            xml("put", id="ab1", at='{"x": 4}', unit="C", note="a/<parameter=few>"),
        ),
    ),
    "python": (
        PYTHON,
        None,
        ("[add(n=4)]", "[look()]", "[look(a='it\\'s', b=[True, None, {\"c\": -1.5}]), add(n=9)]"),
        ("", "Hm.", "[]", "[add()]", "[add(n=10)]", "[add(n='x')]", "[other()]", "[add(n=4)] ok", "[look(a=b)]"),
    ),
    "python, one": (evolve(PYTHON, parallel=False), None, ("[add(n=4)]",), ("[add(n=4), look()]",)),
    "python, values": (
        evolve(PYTHON, tools={"put": PUT}),
        None,
        ('[put(id="ab1", at={"x": 4}, unit=null)]', '[put(id="ab1", at={"x": 4}, unit="C", note="a/b", sure=True)]'),
        (
            '[put(id="ab1", at={"x": 4})]',
            '[put(id="ab", at={"x": 4}, unit="C")]',
            '[put(id="ab1", at={"x": 10}, unit="C")]',
        ),
    ),
    "python, types": (
        evolve(PYTHON, tools={"add": FunctionTool("add", None, TYPED)}),
        None,
        ("[add(path='a', n=None)]", '[add(path="", n=5, unit="K")]'),
        ("[add(path=1, n=5)]", "[add(path='a', n='5')]", "[add(n=5, path='a')]", "[add(path='a', n=5, more=1)]"),
    ),
    "python, none required": (
        evolve(PYTHON, tools={"look": FunctionTool("look", None, {"properties": {"a": {}, "b": {}}})}),
        None,
        ("[look()]", "[look(a=1)]", "[look(b=1)]", "[look(a=1, b=2)]"),
        ("[look(b=1, a=1)]", "[look(, b=1)]", "[look(a=1, )]"),
    ),
    "python, strict": (
        evolve(PYTHON, choice=ToolChoice()),
        None,
        ("", "[see] add(n=10)", "It is [add(n=10)], say.", "[add(n=4)]", "So:\n  [look(a=1), add(n=5)]", "[1, 2]"),
        ("[add(n=10)]", "So:\n[add(n='x')]", "[ add(n=10)]", "[add(n=4)] ok"),
    ),
    "python, allowed": (
        evolve(PYTHON, choice=ToolChoice(allowed_names=("look",))),
        None,
        ("[look()]", "Hm."),
        ("[add(n=4)]",),
    ),
    "bare, strict": (
        evolve(BARE, choice=ToolChoice()),
        None,
        ("", '{"a": 1}', '{"name": "Ann"}', 'So: {"name": "add"}', 'So:\n{"name": "add", "parameters": {"n": 4}}'),
        ('{"name": "add", "parameters": {"n": 10}}', 'So:\n {"parameters": {}, "name": "add"}', '{"name":"add"}'),
    ),
    "gemma": (
        GEMMA,
        None,
        (gemma("add", "n:5"), gemma("look", ""), gemma("look", 'a:<|"|>b, {"c"<|"|>,d:[1,true,{e:null}]')),
        ("", "Hm.", gemma("add", "n:a"), gemma("add", ""), gemma("look", "a:b"), gemma("other", "")),
    ),
    "bare": (BARE, None, ('{"name": "add", "parameters": {"n": 4}}',), ("Hm.", '{"name": "add", "parameters": {}}')),
}


@pytest.mark.parametrize("known", [True, False], ids=["tokens of their own", "plain text"])
@pytest.mark.parametrize("name", CASES)
def test_what_may_be_answered(grammars: Grammars, tokenizer: Tokenizer, name: str, known: bool) -> None:
    reader, form, good, bad = CASES[name]
    grammar = build_answer_grammar(reader, form, tokenizer.controls if known else ())
    assert grammar is not None
    for text in (*good, *bad):
        (tokens,) = tokenizer.encode_now([text], controls=known)
        whole = (*tokens, tokenizer.end_tokens[0])
        matching, at = grammars.match(grammar), 0
        while at < len(whole) and allowed(matching, whole[at]):
            matching.append(whole[at : at + 1])
            at += 1
        assert (at == len(whole)) == (text in good), (
            f"{text!r} is left at {tokenizer.decode(whole[:at], special=True)!r}"
        )
    for text in good:
        check_reading(reader, text)


def check_reading(reader: AnswerReader, text: str) -> None:
    """Check that the reader finds the calls that were asked for, with arguments that obey strict schemas."""
    parser = reader.start_parser()
    pieces = [*parser.push(text), *parser.finish()]
    said = join_blocks(pieces)
    assert reader.check_choice([block.name for block in said if isinstance(block, ToolCall)]) is not False
    for block in said:
        if isinstance(block, ToolCall) and (tool := reader.tools[block.name]).strict:
            jsonschema.validate(json.loads(block.arguments), tool.parameters)


def allowed(matching: Any, token: int) -> bool:
    mask = matching.mask(())
    return not isinstance(mask, str) and bool(mask[token // 8] >> token % 8 & 1)


@pytest.mark.parametrize(
    "reader",
    [
        AnswerReader(),
        AnswerReader(calls="hermes", tools={"look": LOOK}),  # no tool is strict
        AnswerReader(calls="hermes", choice=ToolChoice("none")),
        THINKS,
    ],
)
def test_whoever_asks_for_nothing_gets_no_grammar(reader: AnswerReader) -> None:
    assert build_answer_grammar(reader, None, ()) is None


REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "a format of bare text": ("qwen-xml", {"properties": {"a": {"type": "string", "format": "date"}}}, '"format"'),
    "all of them": ("qwen-xml", {"properties": {"a": {"allOf": [{"type": "string"}]}}}, '"allOf"'),
    "what is of all arguments": ("pythonic", {"properties": {}, "minProperties": 2}, '"minProperties"'),
    "a union of nothing": ("qwen-xml", {"properties": {"a": {"anyOf": 5}}}, '"anyOf"'),
    "a key that has no place": ("pythonic", {"properties": {"a b": {}}, "required": ["a b"]}, '"a b"'),
    "arguments that are no object": ("pythonic", {"type": ["string", "null"]}, 'type .*"object", not \\["string"'),
    "a type that there is not": ("qwen-xml", {"type": "frob"}, '"frob"'),
    "properties that are no object": ("pythonic", {"type": "object", "properties": []}, "properties"),
    "a property that is no schema": ("qwen-xml", {"properties": {"a": 7}}, "object of schemas"),
    "a property that nothing is": ("pythonic", {"properties": {"a": False}}, "object of schemas"),
    "required that is a text": ("pythonic", {"properties": {"a": {}}, "required": "a"}, "required"),
    "a union that leads back to itself": (
        "qwen-xml",
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
        "too many",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_form_cannot_hold_is_refused_by_name(name: str) -> None:
    calls, schema, word = REFUSED[name]
    strict = AnswerReader(calls=calls, tools={"add": FunctionTool("add", None, schema, strict=True)})
    with pytest.raises(GrammarRefused, match=word):
        build_answer_grammar(strict, None, ())
    # who does not say so is held to what there is room for
    free = evolve(strict, tools={"add": FunctionTool("add", None, schema)}, choice=ToolChoice("required"))
    assert build_answer_grammar(free, None, ()) is not None


def test_a_name_that_a_form_cannot_write_is_refused() -> None:
    tools = {"a:b": FunctionTool("a:b")}
    with pytest.raises(GrammarRefused, match="names"):
        build_answer_grammar(AnswerReader(calls="pythonic", tools=tools, choice=ToolChoice("required")), None, ())


def test_types_that_lead_in_circles_are_read_once() -> None:
    """Eight steps along thirty references each would be 656 thousand million."""
    many = {"anyOf": [{"$ref": "#/$defs/many"} for _ in range(30)] + [{"type": "integer"}]}
    assert collect_types({"$ref": "#/$defs/many"}, {"$defs": {"many": many}}) == {"integer"}


def test_a_value_with_more_schemas_than_are_read_may_be_anything() -> None:
    assert collect_types({"anyOf": [{"type": "integer"}] * 2}, {}) == {"integer"}
    assert collect_types({"anyOf": [{"type": "integer"} for _ in range(MAX_SCHEMAS_READ)]}, {}) == frozenset()


def test_the_demo_keeps_to_a_required_call() -> None:
    demo = Tokenizer.load(Path("adapters/demo"))
    grammar = build_answer_grammar(REQUIRED, None, demo.controls)
    assert grammar is not None
    matching = Grammars(demo).match(grammar)
    assert allowed(matching, demo.controls["<tool_call>"].id)
    assert not any(allowed(matching, token) for token in range(100, demo.size))
