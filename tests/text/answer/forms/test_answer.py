"""Tests of how an answer is read: reasoning, text and calls, wherever its text is cut. Broken calls are text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import (
    AnswerBlock,
    AnswerPiece,
    ArgumentsPiece,
    CallBegun,
    CallEnded,
    ReasoningPiece,
    TextPiece,
    join_blocks,
    merge_pieces,
)
from adapters.text.conversation import FunctionTool, ToolCall

SCHEMA = {
    "type": "object",
    "$defs": {"count": {"type": "integer"}},
    "properties": {
        "city": {"type": "string"},
        "n": {"$ref": "#/$defs/count"},
        "ratio": {"type": ["number", "null"]},
        "tags": {"type": "array"},
        "deep": {"type": "object"},
        "sure": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = {name: FunctionTool(name, None, SCHEMA) for name in ("get", "put", "functions.run")}
READER = AnswerReader(tools=TOOLS, reasoning="think")
SAID, THOUGHT = TextPiece, ReasoningPiece


def call(number: int, name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(f"call{number}", name, arguments)


HERMES: list[tuple[str, list[AnswerBlock]]] = [
    ("Only text, with a < and a <tool", [SAID("Only text, with a < and a <tool")]),
    (" text\n\n", [SAID(" text\n\n")]),
    (
        (
            'First.\n<tool_call>\n{"name": "get", "arguments": {"city": "Bonn"}}\n</tool_call>\nThen.\n'
            '<tool_call>\n{"name": "put", "arguments": {"n": [1, {"x": "}"}]}}\n</tool_call>\n Last. \n'
        ),
        [
            SAID("First."),
            call(0, "get", '{"city": "Bonn"}'),
            SAID("Then."),
            call(1, "put", '{"n": [1, {"x": "}"}]}'),
            SAID("Last. \n"),
        ],
    ),
    ('<tool_call>{"arguments": {"n": 1}, "name": "get"}</tool_call>', [call(0, "get", '{"n": 1}')]),
    ('<tool_call>{"name": "get", "parameters": {"n": 1}, "id": "x"}</tool_call>', [call(0, "get", '{"n": 1}')]),
    ('<tool_call>{"name": "functions.run"}</tool_call>', [call(0, "functions.run")]),
    ('<tool_call>{"name": "get", "arguments": null}</tool_call>', [call(0, "get")]),
    ('<tool_call>{"name": "get", "arguments": "{\\"n\\": 1}"}</tool_call>', [call(0, "get", '{"n": 1}')]),
    (
        '<tool_call>{"name": "a_new_one", "arguments": {}}</tool_call>',
        [SAID('<tool_call>{"name": "a_new_one", "arguments": {}}</tool_call>')],
    ),
    # a brace too few, too many, and an end that is missing
    ('<tool_call>{"name": "get", "arguments": {"n": 1}</tool_call>', [call(0, "get", '{"n": 1}')]),
    ('<tool_call>{"name": "get", "arguments": {"n": 1}}}</tool_call>', [call(0, "get", '{"n": 1}')]),
    ('<tool_call>{"name": "get", "arguments": {"n": 1}}', [call(0, "get", '{"n": 1}')]),
    # cut off: as far as it went, and closed
    ('<tool_call>{"name": "get", "arguments": {"city": "Bo', [call(0, "get", '{"city": "Bo"}')]),
    ('<tool_call>{"name": "get", "arguments": {"city": "B\\', [call(0, "get", '{"city": "B"}')]),
    ('<tool_call>{"name": "get", "argum', [SAID('<tool_call>{"name": "get", "argum')]),
    # no calls at all
    ("<tool_call>", [SAID("<tool_call>")]),
    ("a <tool_call> b </tool_call>", [SAID("a <tool_call> b </tool_call>")]),
    ('<tool_call>{"name": "", "arguments": {}}', [SAID('<tool_call>{"name": "", "arguments": {}}')]),
    ('<tool_call>{"name": 5}</tool_call>', [SAID('<tool_call>{"name": 5}</tool_call>')]),
    ('<tool_call>{"nam": "get"}</tool_call>', [SAID('<tool_call>{"nam": "get"}</tool_call>')]),
    ('<tool_call>{"arguments": {}}</tool_call>', [SAID('<tool_call>{"arguments": {}}</tool_call>')]),
    ('<tool_call>{"name": "get", "arguments": [1]}', [SAID('<tool_call>{"name": "get", "arguments": [1]}')]),
    ('<tool_call>{"name": "\\ud800"}', [SAID('<tool_call>{"name": "\\ud800"}')]),
    ('<tool_call>\n{"name": "' + "x" * 129, [SAID('<tool_call>\n{"name": "' + "x" * 129)]),
    # broken, and one that is not
    ('x\n<tool_call>no<tool_call>{"name": "get"}</tool_call>', [SAID("x\n<tool_call>no"), call(0, "get")]),
    # broken before anything of the arguments is certain: text; after that, it ends there, and the rest is text
    (
        '<tool_call>{"name": "get", "arguments": {"n": ]}}</tool_call> so',
        [SAID('<tool_call>{"name": "get", "arguments": {"n": ]}}</tool_call> so')],
    ),
    (
        '<tool_call>{"name": "get", "arguments": {"n": 1</tool_call> so',
        [call(0, "get", '{"n": 1}'), SAID("so")],
    ),
    (
        '<tool_call>{"name": "get", "arguments": {"city": "Bonn", "n": ]}}</tool_call> so',
        [call(0, "get", '{"city": "Bonn"}'), SAID(', "n": ]}}</tool_call> so')],
    ),
    ('<tool_call>{"name": "get", "arguments": {}, "x": 1}', [call(0, "get"), SAID(', "x": 1}')]),
    # reasoning
    ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", [THOUGHT("Hm.\n\nSo."), SAID("Yes.")]),
    ('<think>a</think><tool_call>{"name": "get"}</tool_call>', [THOUGHT("a"), call(0, "get")]),
    ("<think>\n\n</think>\n\nYes.", [SAID("Yes.")]),
    ("\n<think>never ended \n", [THOUGHT("never ended")]),
    ('<think><tool_call>{"name": "get"}</think>b', [THOUGHT('<tool_call>{"name": "get"}'), SAID("b")]),
    ("Yes <think>no</think>", [SAID("Yes <think>no</think>")]),
    ("</think>x", [SAID("</think>x")]),
    ("<thi", [SAID("<thi")]),
]
XML: list[tuple[str, list[AnswerBlock]]] = [
    (
        "Hi.\n\n<tool_call>\n<function=get>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>\n",
        [SAID("Hi."), call(0, "get", '{"city": "Bonn"}')],
    ),
    ("<tool_call>\n<function=get>\n</function>\n</tool_call>", [call(0, "get")]),
    (
        (
            "<tool_call><function=get><parameter=n>5</parameter></function>"
            "<function=put><parameter=city>a\n\n</parameter></function></tool_call>x"
        ),
        [call(0, "get", '{"n": 5}'), call(1, "put", '{"city": "a\\n"}'), SAID("x")],
    ),
    (
        '<function=get><parameter=city>\n</parameter> of </par <b>"\\\n</parameter>\n</function> y',
        [call(0, "get", '{"city": "</parameter> of </par <b>\\"\\\\"}'), SAID("y")],
    ),
    ("<function=get><parameter=city>\ncut \n\n", [call(0, "get", '{"city": "cut \\n"}')]),
    ("<tool_call>\n<function=", [SAID("<tool_call>\n<function=")]),
    ("<function=>x", [SAID("<function=>x")]),
    ("<function=a b></function>", [SAID("<function=a b></function>")]),
    ("<tool_call>{}", [SAID("<tool_call>{}")]),
    ("<function=get><parameter=city>a</parameter></func", [call(0, "get", '{"city": "a"}')]),
    ("<function=get>what", [SAID("<function=get>what")]),
]
VALUES = [
    ("n", "5", 5), ("n", "five", "five"), ("n", "5.0", 5), ("n", "5.5", "5.5"), ("ratio", "1e3", 1000.0),
    ("ratio", "None", None), ("ratio", "NaN", "NaN"), ("tags", '["a", 1]', ["a", 1]), ("tags", "['a']", ["a"]),
    ("deep", '{"a": {"b": null}}', {"a": {"b": None}}), ("sure", "True", True), ("sure", "false", False),
    ("sure", "1", "1"), ("unit", "5", "5"), ("city", "true", "true"), ("maybe", "null", None), ("maybe", "7", "7"),
    ("unknown", "7", "7"), ("city", '"quoted"', '"quoted"'), ("tags", "[" * 70 + "]" * 70, None),
]  # fmt: skip
LLAMA: list[tuple[str, list[AnswerBlock]]] = [
    ('{"name": "get", "parameters": {"n": "1"}}', [call(0, "get", '{"n": "1"}')]),
    ('<|python_tag|>{"type": "function", "name": "get", "parameters": {}}', [call(0, "get")]),
    ('{"name": "get"}; {"name": "put", "parameters": {"n": 2}}', [call(0, "get"), call(1, "put", '{"n": 2}')]),
    ('Look:\n{"name": "get", "parameters": {}}\nDone.', [SAID("Look:"), call(0, "get"), SAID("Done.")]),
    ('It is {"name": "get"}', [SAID('It is {"name": "get"}')]),
    ('{"name": "unknown", "parameters": {}}', [SAID('{"name": "unknown", "parameters": {}}')]),
    ('{"answer": 1}\n{"name": "get"}', [SAID('{"answer": 1}'), call(0, "get")]),
    ("<|python_tag|>print(1)", [SAID("<|python_tag|>print(1)")]),
    ("{", [SAID("{")]),
]
PYTHONIC: list[tuple[str, list[AnswerBlock]]] = [
    (
        "[get(city='it\\'s \\x41\\u00e9\\n', n=-3, ratio=1.5e2), put()]\nDone.",
        [call(0, "get", '{"city": "it\'s Aé\\n", "n": -3, "ratio": 150.0}'), call(1, "put"), SAID("Done.")],
    ),
    ('<|python_start|>[get(tags=["a", [], {}], deep={"a": None, "b": True})]<|python_end|>',
     [call(0, "get", '{"tags": ["a", [], {}], "deep": {"a": null, "b": true}}')]),
    ("[functions.run()]", [call(0, "functions.run")]),
    ("[get(), other()]", [call(0, "get"), SAID(", other()]")]),
    ("[get(1)]", [SAID("[get(1)]")]),
    ("[get(n=__import__('os'))]", [SAID("[get(n=__import__('os'))]")]),
    ("[get(n=1e999)]", [SAID("[get(n=1e999)]")]),
    ("[get(n=1, n=2)]", [SAID("[get(n=1, n=2)]")]),
    ("[get(city='\\ud800')]", [SAID("[get(city='\\ud800')]")]),
    ("[get(tags=" + "[" * 70, [SAID("[get(tags=" + "[" * 70)]),
    ("[get(city='cut", [SAID("[get(city='cut")]),
    ("[1, 2] and a [get()]", [SAID("[1, 2] and a [get()]")]),
]  # fmt: skip
Q = '<|"|>'
GEMMA4: list[tuple[str, list[AnswerBlock]]] = [
    ("Text, with a <|tool", [SAID("Text, with a <|tool")]),
    (
        f"Look. <|tool_call>call:get{{city:{Q}Bonn \"am\" Rhein\\n{Q},n:3}}<tool_call|>",
        [SAID("Look."), call(0, "get", '{"city": "Bonn \\"am\\" Rhein\\\\n", "n": 3}')],
    ),
    (
        (
            f"<|tool_call>call:put{{tags:[1,{Q}a\nb{Q},null],deep:{{a:{{b:true}},c:[]}}}}<tool_call|>"
            "<|tool_call>call:functions.run{}<tool_call|> Done."
        ),
        [
            call(0, "put", '{"tags": [1, "a\\nb", null], "deep": {"a": {"b": true}, "c": []}}'),
            call(1, "functions.run"),
            SAID("Done."),
        ],
    ),
    (f"<|tool_call>call:get{{unit:F,{Q}city{Q}:-1}}<tool_call|>", [call(0, "get", '{"unit": "F", "city": -1}')]),
    (f"<|tool_call>call:get{{city:{Q}cut", [call(0, "get", '{"city": "cut"}')]),
    ("<|tool_call>call:other{}<tool_call|>", [SAID("<|tool_call>call:other{}<tool_call|>")]),
    ("<|tool_call>get{}<tool_call|>", [SAID("<|tool_call>get{}<tool_call|>")]),
]  # fmt: skip
CASES = [
    (form, text, said)
    for form, cases in (
        ("hermes", HERMES),
        ("qwen-xml", XML),
        ("llama3-json", LLAMA),
        ("pythonic", PYTHONIC),
        ("gemma4", GEMMA4),
    )
    for text, said in cases
]


def read(parts: Sequence[str], reader: AnswerReader) -> list[AnswerPiece]:
    numbers = itertools.count()
    parser = reader.start_parser(lambda: f"call{next(numbers)}")
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merge_pieces([*pieces, *parser.finish()])


@pytest.mark.parametrize(("form", "text", "said"), CASES, ids=lambda value: str(value)[:50])
def test_an_answer_says_the_same_however_it_is_cut(form: str, text: str, said: list[AnswerBlock]) -> None:
    reader = evolve(READER, calls=form)
    whole = read([text], reader)
    assert list(join_blocks(whole)) == said
    in_order(whole)
    assert read(list(text), reader) == whole
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], reader) == whole


def in_order(pieces: Sequence[AnswerPiece]) -> None:
    """Calls are numbered, end before the next one begins, and no piece is empty."""
    begun = ended = 0
    for piece in pieces:
        match piece:
            case CallBegun(place):
                assert place == begun == ended
                begun += 1
            case ArgumentsPiece(place, text):
                assert place == begun - 1 == ended
                assert text
            case CallEnded(place):
                assert place == ended == begun - 1
                ended += 1
            case TextPiece(text) | ReasoningPiece(text):
                assert text
                assert begun == ended
    assert begun == ended


WORDS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<parameter=",
    "</parameter>",
    "</function>",
    "<think>",
    "</think>",
]
WORDS += [
    '{"name": "get", ',
    '"arguments": ',
    '"parameters": {',
    "}",
    "{",
    "[",
    "]",
    '"',
    "\\",
    ":",
    ",",
    ";",
    "\n",
    " ",
]
WORDS += ["get", "put", "(", ")", "=", "'", ">", "<", "<|python_tag|>", "n", "5", "true", "city"]


@given(
    st.lists(st.sampled_from(WORDS), max_size=24).map("".join),
    st.sampled_from(["hermes", "qwen-xml", "llama3-json", "pythonic", "gemma4", "none"]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_text_in_any_pieces(text: str, form: str, parallel: bool, opened: bool, data: st.DataObject) -> None:
    reader = evolve(READER, calls=form, parallel=parallel, starts_in_reasoning=opened)
    whole = read([text], reader)
    in_order(whole)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert read([text[one:other] for one, other in itertools.pairwise([0, *cuts, len(text)])], reader) == whole


@given(st.text(max_size=60), st.sampled_from(["hermes", "qwen-xml", "llama3-json", "pythonic", "gemma4"]))
def test_text_without_calls_stays_as_it_is(text: str, form: str) -> None:
    assert list(join_blocks(read(list(text), AnswerReader(form, TOOLS)))) == ([SAID(text)] if text else [])


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_parameter_has_the_type_that_its_schema_says(key: str, text: str, value: object) -> None:
    answer = f"<tool_call><function=get><parameter={key}>\n{text}\n</parameter></function></tool_call>"
    (made,) = join_blocks(read([answer], evolve(READER, calls="qwen-xml")))
    assert isinstance(made, ToolCall)
    found = json.loads(made.arguments)[key]
    assert (found, type(found)) == (value, type(value)) or "[[" in text


def test_what_is_certain_is_said_at_once() -> None:
    parser = evolve(READER, calls="hermes").start_parser(lambda: "call0")
    said = [
        merge_pieces(parser.push(part))
        for part in ("Hi", " there\n<tool", '_call>{"name": "get", ', '"arguments": {"city": "Bo')
    ]
    assert said == [
        [SAID("Hi")],
        [SAID(" there")],
        [],
        [CallBegun(0, "call0", "get"), ArgumentsPiece(0, '{"city": "Bo')],
    ]


# What an answer says first, what closes the only call that it may have, and what is not looked at any more.
ONLY = {
    "hermes": ('<tool_call>{"name": "get", "arguments": {}', "}\n</tool_call>", "b"),
    "qwen-xml": ("<tool_call><function=get></function>", "\n</tool_call>", "b"),
    "llama3-json": ('{"name": "get", "parameters": {}', "};", ' {"name": "get"'),
    "pythonic": ("[get()", "]<|python_end|>", "b"),
    "pythonic, and goes on": ("[get()", ",", " get()]"),
}


@pytest.mark.parametrize("form", ONLY)
def test_one_call_is_enough_where_they_may_not_be_parallel(form: str) -> None:
    """The closing text of the call is part of the answer, because the conversation comes back with it."""
    one, closing, more = ONLY[form]
    parser = evolve(READER, calls=form.partition(",")[0], parallel=False).start_parser(lambda: "call0")
    said = list[AnswerPiece]()
    for text in (one, *closing):
        assert not parser.is_closed, text
        said += parser.push(text)
    assert parser.is_closed
    assert join_blocks([*said, *parser.push(more), *parser.finish()]) == (call(0, "get"),)


def test_without_tools_and_without_reasoning_all_is_text() -> None:
    text = '<think>a</think><tool_call>{"name": "get"}</tool_call>'
    assert read([text], AnswerReader("hermes")) == [SAID(text)]
    assert read([text], AnswerReader("none", TOOLS, reasoning="think"))[0] == THOUGHT("a")


@pytest.mark.parametrize("starts", [False, True])
def test_the_reasoning_of_gemma_has_a_label(starts: bool) -> None:
    reader = AnswerReader(reasoning="gemma4", starts_in_reasoning=starts)
    text = ("" if starts else "<|channel>thought\n") + "I think.\n<channel|>So it is."
    for parts in ([text], list(text)):
        assert list(join_blocks(read(parts, reader))) == [THOUGHT("I think."), SAID("So it is.")]
    assert list(join_blocks(read(["<|channel>thought\n<channel|>Yes."], AnswerReader(reasoning="gemma4")))) == [
        SAID("Yes.")
    ]
