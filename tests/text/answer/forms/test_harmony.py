"""Answers in the harmony format: channels, calls, and what a constrained answer may be."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from adapters.text.answer.answer_parser import AnswerReader
from adapters.text.answer.answer_pieces import ReasoningPiece, TextPiece, join_blocks
from adapters.text.answer.detect_call_form import detect_call_form
from adapters.text.answer.forms.harmony_calls import CONTROLS
from adapters.text.answer.whole_answer_grammar import build_answer_grammar
from adapters.text.conversation import FunctionTool, ToolCall, ToolChoice
from adapters.text.grammars.grammar import Grammars, build_json_grammar
from adapters.text.template import ChatTemplate, ControlToken
from adapters.text.tokenizer import Tokenizer
from tests.examples import count_examples
from tests.text import small
from tests.text.answer.forms.test_broken_calls import TOOLS, arguments, broken, read, simplify_blocks, words
from tests.text.test_held import allowed

SAID, THOUGHT = TextPiece, ReasoningPiece
READER = AnswerReader(calls="harmony", tools=TOOLS)
NEXT = "<|end|><|start|>assistant"


def think(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}"


def say(text: str, channel: str = "final") -> str:
    return f"<|channel|>{channel}<|message|>{text}"


def call(values: Any, name: str = "write") -> str:
    written = values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{written}"


MADE = ("write", {"path": "a.py"})
CASES: dict[str, tuple[str, list[Any]]] = {
    "a final message": (say("Hello."), [SAID("Hello.")]),
    "reasoning first": (think("Hm.") + NEXT + say("Hello."), [THOUGHT("Hm."), SAID("Hello.")]),
    "reasoning twice": (think("A.") + NEXT + think("B.") + NEXT + say("C"), [THOUGHT("A.\n\nB."), SAID("C")]),
    "a call": (call({"path": "a.py"}) + "<|call|>", [MADE]),
    "a call without its end": (call({"path": "a.py"}), [MADE]),
    "a call that is cut off": (call('{"path": "a.py'), [MADE]),
    "a call as templates write it": (
        ' to=functions.write<|channel|>commentary json<|message|>{"path": "a.py"}<|call|>',
        [MADE],
    ),
    "a call without the space": ('to=functions.write<|message|>{"path": "a.py"}<|call|>', [MADE]),
    "reasoning, a preamble and a call": (
        think("Hm.") + NEXT + say("I write.", "commentary") + NEXT + call({"path": "a.py"}) + "<|call|>",
        [THOUGHT("Hm."), SAID("I write."), MADE],
    ),
    "two calls": (call({"path": "a.py"}) + "<|call|><|start|>assistant" + call({}, "bash"), [MADE, ("bash", {})]),
    "a preamble and an answer": (say("A.", "commentary") + NEXT + say("B."), [SAID("A.\n\nB.")]),
    "a function that is not declared": (call({"a": 1}, "other"), [SAID('to=functions.other {"a": 1}')]),
    "arguments that are no object": (call("[1]"), [SAID("[1]")]),
    "no channels": ("Hello there.", [SAID("Hello there.")]),
    "reasoning that never ends": (think("Hm. to=functions.write {"), [THOUGHT("Hm. to=functions.write {")]),
    "a channel that there is not": (say("So.", "summary"), [SAID("So.")]),
    "a header that is cut off": ("<|channel|>fin", []),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_are_reasoning_text_and_calls(name: str) -> None:
    text, expected = CASES[name]
    if name == "a header that is cut off":
        expected = [SAID("fin")]
    whole = read([text], READER)
    assert simplify_blocks(join_blocks(whole)) == expected
    assert read(list(text), READER) == whole
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], READER) == whole


def test_channels_are_separated_without_any_function() -> None:
    whole = read([think("Hm.") + NEXT + say("Hello.")], AnswerReader(calls="harmony"))
    assert join_blocks(whole) == (THOUGHT("Hm."), SAID("Hello."))
    assert set(CONTROLS) <= set(AnswerReader(calls="harmony").visible_controls)


def test_the_parser_says_when_it_is_inside_reasoning() -> None:
    parser = READER.start_parser(lambda: "call0")
    said = []
    for part in (think("H"), "m.", NEXT, say("Hello.")):
        parser.push(part)
        said.append(parser.is_reasoning)
    assert said == [True, True, False, False]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_wrong_arguments_are_valid_and_any_cut_gives_the_same(seed: int) -> None:
    chance = random.Random(f"harmony {seed}")
    for _ in range(count_examples(80)):
        name = chance.choice(["write", "bash", "other"])
        body = json.dumps(arguments(chance, name))
        head = ["<|channel|>", "commentary", f" to=functions.{name} ", "<|constrain|>", "json", "<|message|>"]
        parts = ["<|channel|>", "analysis", "<|message|>", words(chance), "<|end|>", "<|start|>", "assistant"]
        parts += [
            *head,
            body,
            "<|call|>",
            "<|start|>",
            "assistant",
            "<|channel|>",
            "final",
            "<|message|>",
            words(chance),
        ]
        text = broken(chance, parts)
        whole = read([text], READER)
        for block in join_blocks(whole):
            if isinstance(block, ToolCall):
                assert block.name in TOOLS
                assert isinstance(json.loads(block.arguments), dict)
        assert read(list(text), READER) == whole, repr(text)
        cuts = sorted(chance.sample(range(len(text) + 1), min(3, len(text))))
        assert read([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])], READER) == whole


TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.tool_calls %}"
    "{% set call = message.tool_calls[0].function %}"
    " to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% else %}{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


async def test_the_form_is_found_in_what_a_template_writes() -> None:
    made = ChatTemplate(TEMPLATE, [ControlToken(content, number) for number, content in enumerate(CONTROLS)])
    assert await detect_call_form(made) == "harmony"
    await made.aclose()


@pytest.fixture(scope="module", params=[True, False], ids=["tokens of their own", "plain text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = small.write(tmp_path_factory.mktemp("small"))
    if request.param:
        trained = small.train()
        trained.add_tokens([AddedToken(token, special=False, normalized=False) for token in CONTROLS])
        trained.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(Path(folder))


ADD = FunctionTool(
    "add", None, {"properties": {"n": {"type": "integer", "maximum": 5}}, "required": ["n"]}, strict=True
)
FORM = build_json_grammar({"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False})
STRICT = AnswerReader(calls="harmony", tools={"add": ADD})
REQUIRED = AnswerReader(calls="harmony", tools={"add": ADD}, choice=ToolChoice("required"))
ADDED = call({"n": 4}, "add")
CONSTRAINED: dict[str, tuple[AnswerReader, Any, list[str], list[str]]] = {
    "required": (
        REQUIRED,
        None,
        [ADDED, think("Hm.") + NEXT + ADDED, think("Hm.") + NEXT + say("So.", "commentary") + NEXT + ADDED],
        [say("Hm."), call({"n": 6}, "add"), "", think("Hm.")],
    ),
    "strict": (STRICT, None, [say("Hm."), ADDED, think("a") + NEXT + say("b")], [call({"n": 6}, "add"), "Hm."]),
    "a form": (
        AnswerReader(calls="harmony"),
        FORM,
        [say('{"a": true}'), think("Hm.") + NEXT + say("{}")],
        [say("Hm."), '{"a": true}', say('{"a": 1}')],
    ),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_what_may_be_answered(tokenizer: Tokenizer, name: str) -> None:
    reader, form, good, bad = CONSTRAINED[name]
    grammar = build_answer_grammar(reader, form, tokenizer.controls)
    assert grammar is not None
    grammars = Grammars(tokenizer)
    for text in (*good, *bad):
        (tokens,) = tokenizer.encode_now([text], controls=True)
        matching, fits = grammars.match(grammar), True
        for token in (*tokens, tokenizer.end_tokens[0]):
            fits = fits and allowed(matching, token)
            if fits:
                matching.append((token,))
        assert fits == (text in good), text
