"""Grammars of custom tools: what their input may be in every form of calls, bare or as a JSON string."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import join_blocks
from adapters.text.answer.rules.input_rules import bare_terminal, quoted_input
from adapters.text.answer.rules.quoted_rules import quote_expression, quote_rules
from adapters.text.answer.rules.regular_rules import apply_flags, build_expression
from adapters.text.answer.whole_answer_grammar import build_answer_grammar
from adapters.text.conversation import FunctionTool, ToolCall, ToolChoice
from adapters.text.grammars.grammar import GrammarRefused, Grammars
from adapters.text.tokenizer import Tokenizer
from effects.grammar import Grammar
from tests.pairs import in_turns, usual_where
from tests.text import small
from tests.text.test_held import allowed

CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
EDITS = r"""
start: "*** Begin" LF edit+ "*** End" LF?
edit: "file: " /[^\n"]+/ LF line*   // one file
line: /[ +-]/ /(.*)/ LF
%import common.LF
"""
SUMS = r"""
start: sum
sum: term (("+" | "-") term)*
term: INT | "(" sum ")" | QUOTED
QUOTED: "\"" ("a".."z" | "\\" | "\t")* "\""
%import common.INT
%ignore " "
"""
WORDS = r"""
start: WORD ("," WORD)*
WORD: "yes"i | /n[o\n]/s | "\x41"
"""
COUNTS = r"""
?start.2: TWO~2..3 "," one [","  SLASHES]
one: X "," X{2,} -> named
%import common.LF -> TWO
X: "x"   # a comment
SLASHES.1: /\/{2}/
"""
GRAMMARS: dict[str, tuple[Grammar, tuple[str, ...], tuple[str, ...]]] = {
    "lines": (
        Grammar("lark", EDITS),
        (
            "*** Begin\nfile: a.py\n-x = 1\n+x = \"2\\n\" # {'ä': '\t'}\n*** End",
            "*** Begin\nfile: a b\nfile: c/d\n*** End\n",
        ),
        ("", "Hello", "*** Begin\n*** End", '*** Begin\nfile: "a"\n*** End', "*** Begin\nfile: a\n*x\n*** End"),
    ),
    "sums": (
        Grammar("lark", SUMS),
        ("1", "1 + (2-3)", '"ab\\\tz"', '1+"\\"'),
        ("", "1+", '"A"', '"\n"', "1\n"),
    ),
    "words": (Grammar("lark", WORDS), ("YES,yes", "no", "n\n,A"), ("nO", "n\n\n", "B")),
    "counts": (
        Grammar("lark", COUNTS),
        ("\n\n,x,xx", "\n\n\n,x,xx,//", "\n\n,x,xxxx,//"),
        ("\n,x,xx", "\n\n\n\n,x,xx", "\n\n,x,x"),
    ),
    "expression": (
        Grammar("regex", r'say "[^"/]{1,3}"(/|\\|\.|\s)*'),
        ('say "ab\n"', 'say "\\"', 'say "\t\t\t"/\\. \n\t'),
        ('say ""', 'say "abcd"', 'say "a/"', 'say "a"x'),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small.write(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


TAGGED = {
    "qwen-xml": "<tool_call>\n<function=edit>\n<parameter=input>\n{}\n</parameter>\n</function>\n</tool_call>",
    "seed-xml": "<seed:tool_call>\n<function=edit>\n<parameter=input>{}</parameter>\n</function>\n</seed:tool_call>",
    "minimax-xml": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="input">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "gemma4": '<|tool_call>call:edit{{input:<|"|>{}<|"|>}}<tool_call|>',
    "glm-xml": "<tool_call>edit\n<arg_key>input</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "glm-xml, in one line": "<tool_call>edit<arg_key>input</arg_key><arg_value>{}</arg_value></tool_call>",
}
QUOTED = {
    "hermes": '<tool_call>\n{{"name": "edit", "arguments": {{"input": {}}}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]edit[ARGS]{{"input": {}}}',
    "mistral-json": '[TOOL_CALLS][{{"name": "edit", "arguments": {{"input": {}}}}}]',
    "llama3-json": '{{"name": "edit", "parameters": {{"input": {}}}}}',
    "pythonic": "[edit(input={})]",
}
FORMS = (*TAGGED, *QUOTED)


def written(form: str, text: str) -> str:
    """A call as a template writes it."""
    if form in TAGGED:
        return TAGGED[form].format(text)
    return QUOTED[form].format(json.dumps(text, ensure_ascii=False))


@usual_where(lambda places: places["choice"] == (places["name"] + places["form"]) % 2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_an_input_keeps_to_its_grammar(
    grammars: Grammars, tokenizer: Tokenizer, name: str, form: str, choice: str
) -> None:
    rules, good, bad = GRAMMARS[name]
    tool = FunctionTool("edit", None, CUSTOM, input_grammar=rules)
    chosen = ToolChoice("required") if choice == "required" else ToolChoice()
    reader = AnswerReader(calls=form.partition(",")[0], tools={"edit": tool}, choice=chosen)
    grammar = build_answer_grammar(reader, None, tokenizer.controls)
    assert grammar is not None
    for text in (*good, *bad):
        call = written(form, text)
        (tokens,) = tokenizer.encode_now([call], controls=True)
        whole = (*tokens, tokenizer.end_tokens[0])
        matching, at = grammars.match(grammar), 0
        while at < len(whole) and allowed(matching, whole[at]):
            matching.append(whole[at : at + 1])
            at += 1
        left = tokenizer.decode(whole[:at], special=True)
        assert (at == len(whole)) == (text in good), f"{call!r} is left at {left!r}"
        if text in good:
            parser = reader.start_parser()
            (found,) = join_blocks([*parser.push(call), *parser.finish()])
            assert isinstance(found, ToolCall)
            assert json.loads(found.arguments)["input"] == text


@pytest.mark.parametrize("line", ["\n", ""], ids=["4.5", "4.7"])
def test_calls_are_possible_as_each_generation_of_glm_writes_them(
    grammars: Grammars, tokenizer: Tokenizer, line: str
) -> None:
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    tools = {name: FunctionTool(name, None, schema) for name in ("read", "read_all")}
    reader = AnswerReader(calls="glm-xml", tools=tools, choice=ToolChoice("required"))
    grammar = build_answer_grammar(reader, None, tokenizer.controls)
    assert grammar is not None
    argument = f"<arg_key>{{}}</arg_key>{line}<arg_value>{{}}</arg_value>{line}"
    given = argument.format("path", "a\n b") + argument.format("line", 3)
    answer = f"<tool_call>read_all{line}{given}</tool_call>{line}<tool_call>read{line}</tool_call>"
    (tokens,) = tokenizer.encode_now([answer], controls=True)
    matching = grammars.match(grammar)
    for token in (*tokens, tokenizer.end_tokens[0]):
        assert allowed(matching, token)
        matching.append((token,))
    parser = reader.start_parser()
    found = join_blocks([*parser.push(answer), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in found] == [
        ("read_all", {"path": "a\n b", "line": 3}),
        ("read", {}),
    ]


PARTS = st.sampled_from(
    [
        *(
            "start: ",
            "a: ",
            '"x"',
            '"\\n"',
            "/[^a]+/",
            "/a",
            "a",
            "B",
            "(",
            ")",
            "[",
            "|",
            "*",
            "~2",
            "{1,}",
            "\n",
            "->",
        ),
        *("..", "%import common.LF", "%ignore ", "%lark {", "// x", "# y", "?", "!", ":", ".3", '"', "\\", "i", "é"),
    ]
)


@given(parts=st.lists(PARTS | st.text(max_size=3), max_size=12))
def test_whatever_a_client_calls_a_grammar_is_read_or_refused(parts: list[str]) -> None:
    for source in ("".join(parts), "start: " + " ".join(parts)):
        for grammar in (Grammar("lark", source), Grammar("regex", source)):
            for write in (bare_terminal, quoted_input):
                with suppress(GrammarRefused):
                    write(grammar)


EXPRESSIONS = (
    r"a.c",
    r'[^a]+"?',
    r"(\s|\S)*",
    r"[\x00-\x1f\"]{2,3}",
    r"[\w\\]*\n?",
    r"(?:a|\t)+\D",
    r"[]x\n]",
    r"[^]\n]*",
    r"\\+\/",
)


@in_turns("source", "flags", full=1, one_in=4)
@pytest.mark.parametrize("flags", ["", "s", "i", "is"])
@pytest.mark.parametrize("source", EXPRESSIONS)
@given(text=st.text(st.sampled_from('aAbx1_ "\\/\n\t\r\x00\x1fé中].'), max_size=5))
@example(text='a"c')
@example(text="a\nc")
def test_what_json_makes_of_a_text_is_matched_where_the_text_is(source: str, flags: str, text: str) -> None:
    how = (re.IGNORECASE if "i" in flags else 0) | (re.DOTALL if "s" in flags else 0)
    quoted = quote_expression(source, flags)
    # Python knows no intersections of classes, so `[x&&y]` is written as both of them
    quoted = re.sub(r"\[((?:\[\^?\]?(?:\\.|[^\]\\])*\]|\\.))&&(\[[^\]]*\])\]", r"(?=\2)\1", quoted)
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    assert bool(re.fullmatch(quoted, escaped)) == bool(re.fullmatch(source, text, how))


def test_rules_that_lead_to_themselves_are_no_expression() -> None:
    assert build_expression('start: "a" start?', apply_flags) is None
    assert build_expression("start: other", apply_flags) is None
    assert build_expression('start: "a"\n%ignore " "', apply_flags) is None
    assert build_expression('start: "a" %json {}', apply_flags) is None


def test_rules_that_grow_are_bounded() -> None:
    """Each of these would take minutes or megabytes without a bound."""
    doubled = "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(60)) + 'a60: "x"'
    deep = "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(9000)) + 'a9000: "x"'
    assert build_expression(doubled, apply_flags) is None
    assert build_expression(deep, apply_flags) is None
    for source in ("." * 60_000, "[" * 60_000, "[a]" * 20_000 + "[", "[&&" * 20_000):
        with pytest.raises(GrammarRefused):
            quote_expression(source)
    assert build_expression("start: /" + "[a]" * 20_000, apply_flags) is None
    assert build_expression('start: "' + "\\n" * 20_000, apply_flags) is None


@pytest.mark.parametrize(
    "source",
    [
        'start: %json {"type": "object"}',
        'start: "\\q"',
        'start: "a\\n"i',
        "start: /a/x",
        "start: /[[:alpha:]]/",
        "start: /[a&&b]/",
        r"start: /\P{L}/",
        r"start: /a\b/",
        "start: /(?=a)/",
        "start: /[z-a]/",
        "start: /[^a]+/",
    ],
)
def test_what_cannot_be_escaped_is_refused(source: str) -> None:
    with pytest.raises(GrammarRefused):
        quote_rules(source)
