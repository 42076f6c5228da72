"""Tool loops are what a parser of the field reads, and what they ask for can be known from what stands before it."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from training.agents import HELD_OUT_KEYS, HELD_OUT_THINGS, HELD_OUT_VERBS, KEYS, THINGS, VERBS, ToolLoop
from training.batches import flatten
from training.chat_format import END_OF_TURN
from training.file_tools import FileTools
from training.tool_choice import FunctionChoice

EXAM = (HELD_OUT_VERBS, HELD_OUT_THINGS, HELD_OUT_KEYS)
TOOLS = re.compile(r"<tools>\n(.*)\n</tools>", re.DOTALL)
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def text_of(document):
    return "".join(piece.content for piece in document)


def offered(text):
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in map(json.loads, listed(text))}


def listed(text):
    return TOOLS.search(text)[1].splitlines()


def answers(document):
    return [piece.content.removesuffix(END_OF_TURN) for piece in document if piece.weight]


@pytest.mark.parametrize("seed", range(60))
def test_every_call_is_of_a_tool_that_is_offered_and_keeps_to_its_schema(seed, source):
    document = ToolLoop()(Random(seed), source, 1000)
    parameters = offered(text_of(document))
    for called in CALL.findall("".join(answers(document))):
        call = json.loads(called)
        schema = parameters[call["name"]]
        assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])
        for name, given in call["arguments"].items():
            property_ = schema["properties"][name]
            assert given in property_.get("enum", [given])
            types = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
            assert isinstance(given, types[property_["type"]])


@pytest.mark.parametrize("seed", range(30))
def test_two_steps_are_two_calls_and_what_is_said_stands_in_what_came_before(seed, source):
    document = ToolLoop(*EXAM, steps=2, strange=0)(Random(seed), source, 1000)
    one, other, answer = answers(document)
    (first,), (second,) = CALL.findall(one), CALL.findall(other)
    before = text_of(document).split(one)[0]
    between = text_of(document).split(one)[1].split(other)[0]
    assert all(given in before for given in json.loads(first)["arguments"].values())
    assert all(given in before + between for given in json.loads(second)["arguments"].values())
    results = text_of(document).split(other)[1].split(answer)[0]
    assert answer.removesuffix(".").split(" is ")[-1] in results


def test_what_the_exams_name_is_never_named_in_training():
    assert not set(HELD_OUT_VERBS) & set(VERBS)
    assert not set(HELD_OUT_THINGS) & set(THINGS)
    assert not set(HELD_OUT_KEYS) & set(KEYS)


def test_a_long_exam_has_its_text_before_the_request_and_fits(source, tokenizer):
    ids, weights = flatten(tokenizer, ToolLoop(*EXAM, steps=1, strange=0)(Random(1), source, 8192))
    assert 5000 < len(ids) <= 8192
    assert min(place for place, weight in enumerate(weights) if weight) > 5000


@pytest.mark.parametrize(
    "make", ["_ask_definition", "_ask_place", "_ask_setting", "_ask_copy", "_ask_file", "_ask_output"]
)
def test_files_are_read_and_written_with_tools_that_are_listed(make, source):
    for seed in range(20):
        rng = Random(seed)
        files = FileTools.of(rng)
        names = {tool["function"]["name"] for tool in files.schemas()}
        messages = getattr(files, make)(rng, source, "src/a.py")
        calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
        assert calls
        assert {call["name"] for call in calls} <= names
        assert [message["role"] for message in messages][::2] == ["user"] + ["tool"] * len(calls)
        assert messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("seed", range(30))
def test_a_choice_follows_from_the_request(seed, source):
    """The function that is called or named is the only offered one for its thing. No two functions have a thing in
    common.
    """
    text = text_of(FunctionChoice(ToolLoop())(Random(seed), source, 2000))
    things = {}
    for tool in map(json.loads, listed(text)):
        of = re.fullmatch(r"Give the .* of a (\S+)\.", tool["function"]["description"])
        if of:
            assert things.setdefault(of[1], tool["function"]["name"]) == tool["function"]["name"]
    asked = re.findall(
        r"(?:gives the \S+ of a|for the \S+ of the|for a) (\w+)[?.]<\|im_end\|>\n<\|im_start\|>assistant\n(\S+?)<", text
    )
    assert all(things[thing] == name for thing, name in asked)
    assert asked or CALL.search(text)
