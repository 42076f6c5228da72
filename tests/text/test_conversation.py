"""Tests of conversations as templates get them: with system messages where a template has one place only for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.text.conversation import (
    MAX_ARGUMENT_DEPTH,
    ChatMessage,
    Conversation,
    ToolCall,
    iterate_completed,
    merge_system_messages,
)
from adapters.text.model_text import Text, cut_after
from adapters.text.template import TemplateRefused, join_rendered
from tests.text import small

SYSTEM, RULES, LATE = (ChatMessage("system", text) for text in ("Be brief.", "Rules.", "Mind the date."))
USER, ANSWER = ChatMessage("user", "Hi"), ChatMessage("assistant", "Hello.")
ONE = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}WHAT{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
REFUSES = ONE.replace("WHAT", "{{ raise_exception('System message must be at the beginning.') }}")
FORGETS = (
    ONE.replace("{%- if message.role == 'system' and not loop.first %}WHAT{% endif %}\n", "")
    .replace("{{- '<|im_start|>' +", "{%- if message.role != 'system' or loop.first %}{{- '<|im_start|>' +")
    .replace("'<|im_end|>\\n' }}", "'<|im_end|>\\n' }}{% endif %}")
)


OBJECTS = """\
{%- for message in messages %}
{%- for call in message.tool_calls %}{{ call.function.name }}{% if call.function.arguments is mapping %}
{%- for key, value in call.function.arguments | items %} {{ key }}={{ value }};{% endfor %}
{%- else %}: {{ call.function.arguments }}{% endif %}{% endfor %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
"""


def test_system_messages_become_one_and_the_users() -> None:
    messages = [SYSTEM, RULES, USER, ANSWER, LATE, USER]
    found = merge_system_messages(messages)
    assert found == [
        ChatMessage("system", "Be brief.\n\nRules."),
        USER,
        ANSWER,
        ChatMessage("user", LATE.content),
        USER,
    ]
    assert merge_system_messages([USER, LATE]) == [USER, ChatMessage("user", LATE.content)]
    assert merge_system_messages([SYSTEM, USER]) == [SYSTEM, USER]


@pytest.mark.parametrize(("template", "one"), [(small.TEMPLATE, False), (REFUSES, True), (FORGETS, True)])
async def test_what_a_template_does_with_them_is_found_at_start(tmp_path: Path, template: str, one: bool) -> None:
    text = Text.load(small.write(tmp_path, template))
    try:
        await text.check()
        assert text.single_system == one
        written = join_rendered(await text.render_conversation(Conversation([SYSTEM, RULES, USER, ANSWER, LATE, USER])))
        places = [written.index(message.content) for message in (SYSTEM, RULES, ANSWER, LATE)]
        assert places == sorted(places)
        longer = join_rendered(
            await text.render_conversation(Conversation([SYSTEM, RULES, USER, ANSWER, LATE, USER, ANSWER, LATE]))
        )
        assert longer.startswith(written.removesuffix("<|im_start|>assistant\n")), "a conversation's prompt only grows"
    finally:
        await text.aclose()


def test_an_answer_that_goes_on_is_found_from_behind() -> None:
    assert cut_after(("an answer, an answer", "!\n"), "an answer") == ("an answer, an answer",)
    assert cut_after(("one", "two and more"), "two") == ("one", "two")


def test_an_answer_that_is_not_shown_is_looked_for_in_no_time() -> None:
    """A search letter by letter, as `rfind` does, would take an hour."""
    with pytest.raises(TemplateRefused):
        cut_after(("a" * 4_000_000,), "a</think>" + "a" * 1_000_000)


@pytest.mark.parametrize("depth", [MAX_ARGUMENT_DEPTH - 1, MAX_ARGUMENT_DEPTH, 500, 970, 985, 3000])
async def test_arguments_that_nobody_could_write_are_told_as_they_came(tmp_path: Path, depth: int) -> None:
    """A template that reads the members of a call's arguments has them, wherever that can be."""
    nested = '{"a": ' + "[" * depth + "]" * depth + "}"
    text = Text.load(small.write(tmp_path, OBJECTS))
    calls = [
        ToolCall("1", "f", '{"key": "\\u00e9"}'),
        ToolCall("2", "g", '{"key": "\\ud800"}'),
        ToolCall("3", "h", nested),
    ]
    try:
        assert not text.template.wants_argument_text
        written = join_rendered(
            await text.render_conversation(Conversation([USER, ChatMessage("assistant", "", calls=tuple(calls))]))
        )
    finally:
        await text.aclose()
    assert "f key=\u00e9;" in written
    assert 'g: {"key": "\\ud800"}' in written
    assert (f"h a={'[' * depth}" if depth < MAX_ARGUMENT_DEPTH else f"h: {nested}") in written


def test_what_was_left_out_is_completed_step_by_step_and_members_keep_their_order() -> None:
    """A description that a template does not need would change every prompt behind it."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    tool = {"type": "function", "function": {"name": "look"}}
    variables = {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [tool]}
    objects, described = iterate_completed(variables)
    assert objects["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    assert objects["tools"] == [tool]
    assert described["messages"] == objects["messages"]
    assert [*described["tools"][0]["function"]] == ["name", "description", "parameters"]
    assert [*iterate_completed(described)] == []
