"""Calls that a model writes badly: the obvious reading, or text; in both forms, however the text is cut.

Arguments are JSON objects, only declared functions are called, and nothing that was written is lost.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import (
    AnswerBlock,
    AnswerPiece,
    ReasoningPiece,
    TextPiece,
    join_blocks,
    merge_pieces,
)
from adapters.text.answer.incremental_text import BrokenCall
from adapters.text.answer.json_reader import repair_json, repair_scalar
from adapters.text.conversation import FunctionTool, ToolCall
from tests.examples import count_examples
from tests.pairs import one_in

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "items": {"type": "array"},
        "n": {"type": "integer"},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "deep": {"type": "object"},
    },
    "required": ["path", "content"],
}
BASH = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}}
TOOLS = {
    "write": FunctionTool("write", None, WRITE),
    "bash": FunctionTool("bash", None, {**BASH, "required": ["command"]}),
    "main2": FunctionTool("main2", None, None),
}
READER = AnswerReader(tools=TOOLS, reasoning="think")
SAID, THOUGHT = TextPiece, ReasoningPiece
Expected = list[tuple[str, Any] | TextPiece | ReasoningPiece]


def xml(*parameters: str, name: str = "write") -> str:
    return f"<tool_call>\n<function={name}>\n" + "".join(parameters) + "</function>\n</tool_call>"


def given(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


PATH = given("path", "a.py")
XML: dict[str, tuple[str, Expected]] = {
    "no closer before the next parameter": (
        xml("<parameter=path>\na.py\n<parameter=content>\nx\n</parameter>\n"),
        [("write", {"path": "a.py", "content": "x"})],
    ),
    "no closer before the next parameter, in one line": (
        xml("<parameter=path>a.py<parameter=content>x</parameter>"),
        [("write", {"path": "a.py", "content": "x"})],
    ),
    "a parameter that is none stays in the value": (
        xml(given("content", "see\n<parameter=other>\n<parameter=content>\nso")),
        [("write", {"content": "see\n<parameter=other>\n<parameter=content>\nso"})],
    ),
    "the last closer is missing": (
        xml(PATH, "<parameter=content>\nx\n"),
        [("write", {"path": "a.py", "content": "x"})],
    ),
    "the function's closer is missing": (
        f"<tool_call>\n<function=write>\n{PATH}</tool_call>",
        [("write", {"path": "a.py"})],
    ),
    "all closers are missing": ("<function=write>\n<parameter=path>\na.py", [("write", {"path": "a.py"})]),
    "closers are missing, and another call follows": (
        "<tool_call>\n<function=write>\n<parameter=path>\na.py\n" + xml(given("command", "ls"), name="bash"),
        [("write", {"path": "a.py"}), ("bash", {"command": "ls"})],
    ),
    "a closer is cut off": (f"<tool_call>\n<function=write>\n{PATH}</func", [("write", {"path": "a.py"})]),
    "the next parameter is cut off": (
        f"<tool_call>\n<function=write>\n{PATH}<parameter=cont",
        [("write", {"path": "a.py"}), SAID("<parameter=cont")],
    ),
    "a tag without a key, where one parameter is left": (
        xml("<parameter=\necho\n</parameter>\n", name="bash"),
        [("bash", {"command": "echo"})],
    ),
    "a tag without a key, where there are several": (
        xml("<parameter=\necho\n</parameter>\n"),
        [SAID(xml("<parameter=\necho\n</parameter>\n"))],
    ),
    "a key in the next line": (
        xml("<parameter=\ncommand>\necho\n</parameter>\n", name="bash"),
        [("bash", {"command": "echo"})],
    ),
    "an equals sign behind the key": (xml("<parameter=path=\na.py\n</parameter>\n"), [("write", {"path": "a.py"})]),
    "an equals sign in the tag": (xml("<parameter=path=>\na.py\n</parameter>\n"), [("write", {"path": "a.py"})]),
    "a bracket that is missing": (xml("<parameter=path\na.py\n</parameter>\n"), [("write", {"path": "a.py"})]),
    "a name as an attribute": (
        '<tool_call>\n<function name="bash">\n<parameter name="command">\nls\n</parameter>\n</function>\n</tool_call>',
        [("bash", {"command": "ls"})],
    ),
    "a colon behind the key": (xml('<parameter=items: ["a"]\n</parameter>\n'), [("write", {"items": ["a"]})]),
    "a colon behind the key, and no closer": (xml('<parameter=items: ["a"]\n'), [("write", {"items": ["a"]})]),
    "closers in the value": (
        xml(given("content", "a\n</parameter>\n</function>\nmore"), PATH),
        [("write", {"content": "a\n</parameter>\n</function>\nmore", "path": "a.py"})],
    ),
    "all closers in the value": (
        xml(given("content", "a\n</parameter>\n</function>\n</tool_call>\nmore")),
        [("write", {"content": "a\n</parameter>\n</function>\n</tool_call>\nmore"})],
    ),
    "closers at the end of the value": (
        xml(given("content", "a\n</parameter>\n</function>\n</tool_call>")),
        [("write", {"content": "a\n</parameter>\n</function>\n</tool_call>"})],
    ),
    "a whole call in the value": (
        xml(given("content", "So:\n" + xml(given("command", "ls"), name="bash") + "\nand on"), PATH),
        [("write", {"content": "So:\n" + xml(given("command", "ls"), name="bash") + "\nand on", "path": "a.py"})],
    ),
    "a call of the same function in the value": (
        xml(given("content", "So:\n" + xml(given("path", "b")))),
        [("write", {"content": "So:\n" + xml(given("path", "b"))})],
    ),
    "a parameter that is given twice has its last value": (
        xml(PATH, given("content", "x"), given("path", "b.py")),
        [("write", {"path": "b.py", "content": "x"})],
    ),
    "a parameter that is given twice, with a number": (
        xml(given("n", "1"), given("n", "2")),
        [("write", {"n": 2})],
    ),
    "the tag of a parameter that was given already is text": (
        xml(PATH, "<parameter=content>\nsee\n<parameter=path>\nb.py\n</parameter>\n"),
        [("write", {"path": "a.py", "content": "see\n<parameter=path>\nb.py"})],
    ),
    "text behind a call": (xml(PATH) + "\nDone. </b>", [("write", {"path": "a.py"}), SAID("Done. </b>")]),
    "text behind a call, and another one": (
        xml(PATH) + "\nThen:\n" + xml(given("command", "ls"), name="bash"),
        [("write", {"path": "a.py"}), SAID("Then:"), ("bash", {"command": "ls"})],
    ),
    "a parameter behind the function's closer": (
        xml(PATH, "</function>\n", given("content", "x")),
        [("write", {"path": "a.py", "content": "x"})],
    ),
    "a function that is not declared, in text": (
        "In XML you would write <function=main> here.",
        [SAID("In XML you would write <function=main> here.")],
    ),
    "a declared function in text": (
        "In XML you would write <function=write> here.",
        [SAID("In XML you would write <function=write> here.")],
    ),
    "a function that is not declared": (xml(PATH, name="main"), [SAID(xml(PATH, name="main"))]),
    "a function without parameters": ("<tool_call>\n<function=main2>\n</tool_call>", [("main2", {})]),
    "carriage returns around tags": (
        xml(given("path", "a.py"), given("n", "3"), given("content", "x\r\ny")).replace("\n", "\r\n"),
        [("write", {"path": "a.py", "n": 3, "content": "x\r\r\ny"})],
    ),
    "carriage returns in a value": (
        xml(given("content", "a\r\nb\rc")),
        [("write", {"content": "a\r\nb\rc"})],
    ),
    "a list of Python": (xml(given("items", "['a', True, None,]")), [("write", {"items": ["a", True, None]})]),
    "an object of Python": (xml(given("deep", "{'a': {'b': False}}")), [("write", {"deep": {"a": {"b": False}}})]),
    "an integer as a float": (xml(given("n", "3.0"), given("ratio", "3.0")), [("write", {"n": 3, "ratio": 3.0})]),
    "strings stay strings": (
        xml(given("path", "3.0"), given("content", "['a']")),
        [("write", {"path": "3.0", "content": "['a']"})],
    ),
    "a call in reasoning that never ends": (
        "<think>\nI call it.\n" + xml(PATH),
        [THOUGHT("I call it."), ("write", {"path": "a.py"})],
    ),
    "a call in reasoning that ends": (
        f"<think>\nI call it.\n{xml(PATH)}\nOr not.\n</think>\n\nNo.",
        [THOUGHT(f"I call it.\n{xml(PATH)}\nOr not."), SAID("No.")],
    ),
    "a call that is cut off in reasoning": (
        "<think>\nI call it.\n<function=write>\n<parameter=path>\na.p",
        [THOUGHT("I call it.\n<function=write>\n<parameter=path>\na.p")],
    ),
    "a call in reasoning, and more of it": (
        f"<think>A <tool_call> is\n{xml(PATH)}\nand so",
        [THOUGHT("A <tool_call> is"), ("write", {"path": "a.py"}), THOUGHT("and so")],
    ),
    "an undeclared call in reasoning": (
        "<think>\n" + xml(PATH, name="main"),
        [THOUGHT(xml(PATH, name="main"))],
    ),
}


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def named(arguments: str, name: str = "write") -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


ONE = named('{"path": "a.py"}')
MADE = ("write", {"path": "a.py"})
HERMES: dict[str, tuple[str, Expected]] = {
    "a line break in a string": (hermes(named('{"path": "a\n\tb"}')), [("write", {"path": "a\n\tb"})]),
    "a key that is given twice has its last value": (
        hermes(named('{"path": "b.py", "content": "x", "path": "a.py"}')),
        [("write", {"path": "a.py", "content": "x"})],
    ),
    "a trailing comma": (hermes(named('{"path": "a.py", }')), [MADE]),
    "trailing commas everywhere": (
        hermes('{"name": "write", "arguments": {"items": [1, 2,], "deep": {"a": "b",},},}'),
        [("write", {"items": [1, 2], "deep": {"a": "b"}})],
    ),
    "escapes that JSON does not have": (
        hermes(named(r'{"path": "\d+\.py", "content": "it\'s \x41 \u12"}')),
        [("write", {"path": r"\d+\.py", "content": r"it's \x41 \u12"})],
    ),
    "half of a surrogate pair": (
        hermes(named(r'{"path": "\ud83d b \ud83d\ude00 \ude00"}')),
        [("write", {"path": "\ufffd b \U0001f600 \ufffd"})],
    ),
    "constants of Python": (
        hermes(named('{"sure": True, "items": [False, None]}')),
        [("write", {"sure": True, "items": [False, None]})],
    ),
    "a list of calls": (
        hermes(f"[{ONE}, {named('{}', 'bash')}]"),
        [MADE, ("bash", {})],
    ),
    "the form of the API": (
        hermes('{"type": "function", "function": {"name": "write", "arguments": {"path": "a.py"}}}'),
        [MADE],
    ),
    "the form of the API, arguments as a string": (
        hermes(r'{"function": {"arguments": "{\"path\": \"a.py\"}", "name": "write"}, "type": "function"}'),
        [MADE],
    ),
    "single quotes": (
        hermes("""{'name': 'write', 'arguments': {'path': 'it\\'s "a"', 'content': 'it's'}}"""),
        [("write", {"path": 'it\'s "a"', "content": "it's"})],
    ),
    "keys without quotes": (hermes('{name: "write", arguments: {path: "a.py"}}'), [MADE]),
    "two calls in one tag": (hermes(f"{ONE}\n{named('{}', 'bash')}"), [MADE, ("bash", {})]),
    "two calls in one tag, with a comma": (hermes(f"{ONE}, {ONE}"), [MADE, MADE]),
    "a fence in the tag": (hermes(f"```json\n{ONE}\n```"), [MADE]),
    "bare": (ONE, [MADE]),
    "bare, behind text": (f"I do it:\n\n{ONE}\n", [SAID("I do it:"), MADE]),
    "a bare list": (f"[{ONE},\n{ONE}]", [MADE, MADE]),
    "fenced": (f"So:\n```json\n{ONE}\n```\nDone.", [SAID("So:"), MADE, SAID("Done.")]),
    "fenced, two": (f"```\n{ONE}\n{ONE}\n```", [MADE, MADE]),
    "bare, of an undeclared name": (named("{}", "other"), [SAID(named("{}", "other"))]),
    "bare, within a sentence": (f"Write {ONE} there", [SAID(f"Write {ONE} there")]),
    "bare, with text behind it": (f"{ONE} is how", [SAID(f"{ONE} is how")]),
    "bare, without arguments": ('{"name": "write"}', [SAID('{"name": "write"}')]),
    "bare, cut off": (ONE[:-1], [SAID(ONE[:-1])]),
    "a fence with something else": ("```json\n{}\n```", [SAID("```json\n{}\n```")]),
    "quotes in a string": (
        hermes(named('{"content": "say "hi", she said", "path": "a.py"}')),
        [("write", {"content": 'say "hi", she said', "path": "a.py"})],
    ),
    "JSON in a string, its quotes not escaped": (
        hermes(named('{"content": "{"a": "b"} or", "path": "a.py"}')),
        [("write", {"content": '{"a": "b"} or', "path": "a.py"})],
    ),
    "the end of a call in a string": (
        hermes(named('{"content": "a </tool_call> b"}')),
        [("write", {"content": "a </tool_call> b"})],
    ),
    "the last quote is missing": (hermes(named('{"path": "a.py'))[:-14] + "</tool_call>", [MADE]),
    "a comma is missing": (
        hermes(named('{"path": "a.py"\n "n": 3 "items": []}')),
        [("write", {"path": "a.py", "n": 3, "items": []})],
    ),
    "braces are missing": ('<tool_call>{"name": "write", "arguments": {"path": "a.py"</tool_call>', [MADE]),
    "everything behind the value is missing": ('<tool_call>{"name": "write", "arguments": {"path": "a.py', [MADE]),
    "an integer as a float": (hermes(named('{"n": 3.0, "ratio": 3.0}')), [("write", {"n": 3, "ratio": 3.0})]),
    "numbers that JSON does not have": (
        hermes(named('{"ratio": .5, "n": +1, "items": [1.]}')),
        [("write", {"ratio": 0.5, "n": 1, "items": [1.0]})],
    ),
    "a value that is none": (
        hermes(named('{"n": undefined}')),
        [SAID(hermes(named('{"n": undefined}')))],
    ),
    "a value that is none, behind one": (
        hermes(named('{"path": "a.py", "n": undefined}')),
        [MADE, SAID(', "n": undefined}}\n</tool_call>')],
    ),
    "an undeclared function": (hermes(named("{}", "other")), [SAID(hermes(named("{}", "other")))]),
    "no object": (hermes(named("[1]")), [SAID(hermes(named("[1]")))]),
    "carriage returns": (hermes(ONE).replace("\n", "\r\n"), [MADE]),
    "letters outside ASCII": (hermes(named('{"path": "Zürich 東京 😀"}')), [("write", {"path": "Zürich 東京 😀"})]),
    "a call in reasoning that never ends": (f"<think>\nI do.\n{hermes(ONE)}", [THOUGHT("I do."), MADE]),
    "a call in reasoning that ends": (
        f"<think>\nI do.\n{hermes(ONE)}\n</think>\nNo.",
        [THOUGHT(f"I do.\n{hermes(ONE)}"), SAID("No.")],
    ),
}
CASES = [(form, name) for form, cases in (("qwen-xml", XML), ("hermes", HERMES)) for name in cases]


def read(parts: Sequence[str], reader: AnswerReader) -> list[AnswerPiece]:
    numbers = itertools.count()
    parser = reader.start_parser(lambda: f"call{next(numbers)}")
    pieces = [piece for part in parts for piece in parser.push(part)]
    return merge_pieces([*pieces, *parser.finish()])


def simplify_blocks(said: Sequence[AnswerBlock]) -> Expected:
    return [(one.name, json.loads(one.arguments)) if isinstance(one, ToolCall) else one for one in said]


@pytest.mark.parametrize(("form", "name"), CASES, ids=str)
def test_a_call_that_is_written_badly_has_its_obvious_reading_or_is_text(form: str, name: str) -> None:
    text, expected = {"qwen-xml": XML, "hermes": HERMES}[form][name]
    reader = evolve(READER, calls=form)
    whole = read([text], reader)
    assert simplify_blocks(join_blocks(whole)) == expected
    assert repr(simplify_blocks(join_blocks(whole))) == repr(expected), "3.0 equals 3, and is no integer"
    assert read(list(text), reader) == whole
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], reader) == whole


# --- well-formed calls, broken at random

WORD = re.compile(r"w\d+x")
NAMES = ["write", "write", "bash", "other"]
JUNK = [
    *(
        "\n",
        "\r\n",
        " ",
        "so w1x",
        "</b>",
        "<",
        ">",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        ",",
        ":",
        "`",
        "```",
        "=",
        "-",
    ),
    *("</parameter>", "</function>", "</tool_call>", "<tool_call>", "<parameter=", "<parameter=n>", "<function=bash>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</invoke>", "[TOOL_CALLS]", "[ARGS]"),
    *("<function=", "<think>", "</think>", "null", "True", "3.0", "東", "\\u", "\\ud83d", '"w2x": ', '"path": "w3x"'),
]


def words(chance: random.Random) -> str:
    return chance.choice([" ", "\n", "\r\n", ", ", "\t"]).join(f"w{chance.randrange(1000)}x" for _ in range(3))


def arguments(chance: random.Random, name: str) -> dict[str, Any]:
    if name == "bash":
        return {"command": words(chance), **({"timeout": 5} if chance.random() < 0.5 else {})}
    made: dict[str, Callable[[], Any]] = {
        "path": lambda: words(chance),
        "content": lambda: words(chance) + chance.choice(["", "\n", ' "', "'", "\\n", "<b>", "3.0", "{}", "é"]),
        "items": lambda: [words(chance), 1, None, {"a": True}],
        "n": lambda: chance.randrange(-9, 99),
        "ratio": chance.random,
        "sure": lambda: chance.random() < 0.5,
        "deep": lambda: {"a": {"b": words(chance)}, "c": []},
    }
    return {key: made[key]() for key in chance.sample([*made], chance.randrange(0, 5))}


def as_xml(name: str, values: dict[str, Any]) -> list[str]:
    parts = ["<tool_call>\n", f"<function={name}>\n"]
    for key, value in values.items():
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts += [f"<parameter={key}>\n", written, "\n</parameter>\n"]
    return [*parts, "</function>\n", "</tool_call>"]


def as_hermes(name: str, values: dict[str, Any]) -> list[str]:
    body = json.dumps({"name": name, "arguments": values}, ensure_ascii=False)
    return ["<tool_call>\n", *re.split(r'(?<=["{}\[\],:])|(?=["{}\[\],:])', body), "\n</tool_call>"]


def as_llama(name: str, values: dict[str, Any]) -> list[str]:
    body = json.dumps({"name": name, "parameters": values}, ensure_ascii=False)
    return re.split(r'(?<=["{}\[\],:])|(?=["{}\[\],:])', body)


def as_python(name: str, values: dict[str, Any]) -> list[str]:
    written = ", ".join(f"{key}={value!r}" for key, value in values.items())
    return re.split(r"""(?<=["'{}()\[\],:=])|(?=["'{}()\[\],:=])""", f"[{name}({written})]")


def in_tags(begin: list[str], key: Callable[[str], list[str]], close: str, end: list[str]) -> Callable[..., list[str]]:
    def write(name: str, values: dict[str, Any]) -> list[str]:
        parts = [part.replace("NAME", name) for part in begin]
        for one, value in values.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts += [*key(one), written, close, "\n"]
        return [*parts, *end]

    return write


def as_mistral(name: str, values: dict[str, Any]) -> list[str]:
    body = json.dumps(values, ensure_ascii=False)
    return ["[TOOL_CALLS]", name, "[ARGS]", *re.split(r'(?<=["{}\[\],:])|(?=["{}\[\],:])', body)]


as_seed = in_tags(
    ["<seed:tool_call>\n", "<function=NAME>\n"],
    lambda key: [f"<parameter={key}>"],
    "</parameter>",
    ["</function>\n", "</seed:tool_call>"],
)
as_minimax = in_tags(
    ["<minimax:tool_call>\n", '<invoke name="NAME">\n'],
    lambda key: [f'<parameter name="{key}">'],
    "</parameter>",
    ["</invoke>\n", "</minimax:tool_call>"],
)
as_glm = in_tags(
    ["<tool_call>", "NAME\n"],
    lambda key: ["<arg_key>", key, "</arg_key>\n", "<arg_value>"],
    "</arg_value>",
    ["</tool_call>"],
)
TAGGED = {"qwen-xml": as_xml, "seed-xml": as_seed, "minimax-xml": as_minimax, "glm-xml": as_glm}
FORMS = {**TAGGED, "hermes": as_hermes, "mistral": as_mistral, "llama3-json": as_llama, "pythonic": as_python}


def broken(chance: random.Random, parts: list[str]) -> str:
    """Up to four faults: parts dropped, doubled, swapped, cut short or put in; or the line ends of another system."""
    parts = list(parts)
    for _ in range(chance.randrange(1, 5)):
        at, other = chance.randrange(len(parts)), chance.randrange(len(parts))
        match chance.randrange(8):
            case 0:
                parts[at] = ""
            case 1:
                parts.insert(at, parts[at])
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                parts[at] = parts[at][: chance.randrange(len(parts[at]) + 1)]
            case 4:
                parts.insert(at, chance.choice(JUNK))
            case 5:
                parts = [part.replace("\n", "\r\n") for part in parts]
            case 6:
                parts = [*parts[: at + 1], parts[at][: chance.randrange(len(parts[at]) + 1)]]
            case 7:
                place = chance.randrange(len(parts[at]) + 1)
                parts[at] = parts[at][:place] + chance.choice(JUNK) + parts[at][place:]
    return "".join(parts)


def answer(chance: random.Random, form: str, wrong: bool) -> tuple[str, Expected]:
    """Text, calls and sometimes reasoning; and what it says, where nothing is wrong."""
    parts, expected = list[str](), Expected()
    if chance.random() < 0.2:
        parts += ["<think>\n", words(chance).strip(), "\n</think>\n\n"]
        expected.append(THOUGHT(parts[1]))
    for _ in range(chance.randrange(1, 3)):
        name = chance.choice(NAMES[: 4 if wrong else 3])
        values = arguments(chance, name)
        if chance.random() < 0.3:
            parts.append(f"Now w{chance.randrange(1000)}x.")
            expected.append(SAID(parts[-1]))
            parts.append("\n")
        parts += [*FORMS[form](name, values), "\n"]
        expected.append((name, values))
    return (broken(chance, parts) if wrong else "".join(parts)), expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_a_call_that_is_written_well_is_read_as_it_is(form: str, seed: int) -> None:
    chance = random.Random(f"{form} {seed}")
    for _ in range(30):
        text, expected = answer(chance, form, wrong=False)
        whole = read([text], evolve(READER, calls=form))
        assert simplify_blocks(join_blocks(whole)) == expected, repr(text)
        assert read(list(text), evolve(READER, calls=form)) == whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_an_answer_that_is_cut_off_anywhere_has_the_calls_that_are_there(form: str, seed: int) -> None:
    """A text in them is a beginning of what it would have become."""
    text, expected = answer(random.Random(f"{form} {seed} cut"), form, wrong=False)
    made = [one for one in expected if isinstance(one, tuple)]
    for size in range(len(text)):
        whole = read([text[:size]], evolve(READER, calls=form))
        calls = [one for one in simplify_blocks(join_blocks(whole)) if isinstance(one, tuple)]
        for (name, values), (wanted_name, wanted) in zip(calls, made, strict=False):
            assert name == wanted_name
            for key, value in values.items():
                if isinstance(wanted[key], str):
                    assert f"{wanted[key]}\n</".startswith(value) or f"{wanted[key]}</".startswith(value)
        assert len(calls) <= len(made)
        assert read(list(text[:size]), evolve(READER, calls=form)) == whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_whatever_is_wrong_with_a_call_it_has_valid_arguments_and_nothing_is_lost(form: str, seed: int) -> None:
    """Many more are tried by `test_whatever_is_wrong_with_a_call_for_long`."""
    chance = random.Random(f"{form} {seed} broken")
    for _ in range(count_examples(80)):
        check_broken(chance, form)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_wrong_with_a_call_for_long(form: str) -> None:
    for seed in range(20_000):
        check_broken(random.Random(f"{form} {seed} long"), form)


def check_broken(chance: random.Random, form: str) -> None:
    text, _ = answer(chance, form, wrong=True)
    reader = evolve(READER, calls=form, starts_in_reasoning=chance.random() < 0.1, parallel=chance.random() < 0.9)
    whole = read([text], reader)
    said = join_blocks(whole)
    for call in said:
        if not isinstance(call, ToolCall):
            continue
        assert call.name in TOOLS, repr(text)
        values = json.loads(call.arguments)
        assert isinstance(values, dict), repr(text)
        if form in TAGGED:
            for key in {"path", "content", "command"} & set(values):
                assert isinstance(values[key], str), repr(text)
            assert all(type(value) is not float for key, value in values.items() if key == "n"), repr(text)
    if reader.parallel:
        shown = " ".join(call.arguments if isinstance(call, ToolCall) else call.text for call in said)
        assert not set(WORD.findall(text)) - set(WORD.findall(shown)), (text, said)
    assert read(list(text), reader) == whole, repr(text)
    cuts = sorted(chance.sample(range(len(text) + 1), min(3, len(text))))
    assert read([text[one:other] for one, other in itertools.pairwise([0, *cuts, len(text)])], reader) == whole


WRITING = "<tool_call><function=write><parameter=path>a"
GLM_WRITING = "<tool_call>write<arg_key>path</arg_key><arg_value>a"
NAMING = '<tool_call>{"name": "write", "arguments": {"path": "'
REPEATED = [
    *(("qwen-xml", before, unit) for before in ("", "<think>") for unit in (WRITING, "<function=write> ")),
    *(("qwen-xml", WRITING, unit) for unit in ("</function> x ", "</parameter></function> <function=", "<parameter=n")),
    *(("glm-xml", before, unit) for before in ("", "<think>") for unit in (GLM_WRITING, "<tool_call>write ")),
    *(("glm-xml", GLM_WRITING, unit) for unit in ("</tool_call> x ", "</arg_value></tool_call> ", "<arg_key>n")),
    *(("minimax-xml", before, '<invoke name="write">') for before in ("", "<think>")),
    *(("mistral", "", unit) for unit in ("[TOOL_CALLS]", "[TOOL_CALLS]write[ARGS]{", "[TOOL_CALLS][{")),
    *(("hermes", before, NAMING) for before in ("", "<think>")),
    *(("hermes", NAMING, unit) for unit in ('a" b" ', 'a", "', "</tool_call> x", "\\", '"}')),
    *(("hermes", "", unit) for unit in ('\n{"type": "', "\n```", "\n[", "<tool_call>{", '\n{"type": "a", ')),
]


@one_in(3, "form")
@pytest.mark.parametrize(("form", "before", "unit"), REPEATED)
def test_text_made_of_tags_takes_no_quadratic_time(form: str, before: str, unit: str) -> None:
    def seconds(size: int) -> float:
        text = before + unit * (size // len(unit))
        parser = evolve(READER, calls=form).start_parser(lambda: "call0")
        start = time.thread_time()
        for at in range(0, len(text), 16):
            parser.push(text[at : at + 16])
        parser.finish()
        return time.thread_time() - start

    assert seconds(20_000) < 40 * max(seconds(2_000), 0.005)


# --- JSON


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_valid_json_is_passed_on_as_it_was_written(seed: int) -> None:
    chance = random.Random(seed)
    texts = ['"', "\\", "a", "\n", "{", "}", "]", ",", ":", " ", "</tool_call>", '": "', "é", "\x1f", "😀", "'", '"}']

    def some(depth: int) -> Any:
        match chance.randrange(7 if depth < 4 else 4):
            case 0 | 1:
                return "".join(chance.choices(texts, k=chance.randrange(8)))
            case 2:
                return chance.choice([True, False, None])
            case 3:
                return chance.choice([0, -1, 3.5, 1e300, -2e-9])
            case 4:
                return [some(depth + 1) for _ in range(chance.randrange(4))]
            case _:
                key = "".join(chance.choices(texts, k=3))
                return {f"{key}{number}": some(depth + 1) for number in range(chance.randrange(4))}

    for _ in range(count_examples(300)):
        indent = chance.choice([None, 1])
        written = json.dumps({"a": some(0), "b": some(0)}, ensure_ascii=chance.random() < 0.5, indent=indent)
        assert repair_json(written) == written
        said = read(list(hermes(named(written))), evolve(READER, calls="hermes"))
        assert [one.arguments for one in join_blocks(said) if isinstance(one, ToolCall)] == [written]


@pytest.mark.parametrize("word", ["", "-", "tru", "NaN", "Infinity", "007", "0x1", "1e", "1_000", "--1", "."])
def test_what_is_no_number_and_no_constant_is_not_guessed(word: str) -> None:
    with pytest.raises(BrokenCall):
        repair_scalar(word)


def test_a_string_is_passed_on_while_it_comes_and_its_quote_when_it_is_certain() -> None:
    parser = evolve(READER, calls="hermes").start_parser(lambda: "call0")
    parts = ("<tool_call>" + named('{"path": "a.py')[:-1], '"', ", ", '"n": ', "3", "}")
    said = ["".join(getattr(piece, "text", "") for piece in parser.push(part)) for part in parts]
    assert said == ['{"path": "a.py', "", "", '"', "", ', "n": 3}']
