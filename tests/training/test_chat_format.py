"""The chat template renders conversations, tools and results; training learns what the assistant says."""

from __future__ import annotations

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.chat_format import TEMPLATE, assistant, conversation, render, system, user

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}


def test_a_conversation_is_turns_and_opens_the_next():
    text = render([system("Be kind."), user("Hi"), assistant("Hello."), user("Bye")], prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_stand_in_the_system_message_and_calls_and_results_in_their_turns():
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": [{"type": "text", "text": "2"}]}]
    text = render([system("S"), user("U"), called, *results], [TOOL])
    head, rest = text.split("</tools>")
    assert head.startswith('<|im_start|>system\nS\n\nThese functions can be called:\n<tools>\n{"type": "function"')
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in rest
    responses = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert rest.endswith(f"<|im_start|>user\n{responses}<|im_end|>\n")


def test_arguments_that_are_a_text_are_written_as_they_are():
    function = {"name": "add", "arguments": '{"a": 1}'}
    message = {"role": "assistant", "content": "So.", "tool_calls": [{"function": function}]}
    assert 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in render([message])


def test_the_template_renders_in_a_plain_sandbox_and_refuses_an_unknown_role():
    def refuse(message):
        raise jinja2.TemplateError(message)

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    assert template.render(messages=[user("Hi")], add_generation_prompt=True) == render([user("Hi")], prompt=True)
    with pytest.raises(jinja2.TemplateError, match="unknown role wizard; accepted: system"):
        template.render(messages=[{"role": "wizard", "content": ""}], raise_exception=refuse)


def test_only_what_the_assistant_says_is_learnt_with_the_end_of_its_turn():
    pieces = conversation([user("Hi"), assistant("Hello."), user("Bye"), assistant("See\nyou.")], weight=2.0)
    assert [piece.content for piece in pieces if piece.weight] == ["Hello.<|im_end|>", "See\nyou.<|im_end|>"]
    assert "".join(piece.content for piece in pieces).count("<|im_start|>") == 4
