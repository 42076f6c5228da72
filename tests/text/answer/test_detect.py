"""Tests that the form of tool calls and of reasoning is found in what a chat template writes of a known call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapters.text.answer.detect_call_form import detect_call_form, detect_reasoning
from adapters.text.conversation import ChatMessage, Conversation, ToolCall
from adapters.text.model_text import Text
from adapters.text.template import ChatTemplate, ControlToken, join_rendered
from tests.pairs import in_turns
from tests.text import small

TOKENS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
CONTROLS = [ControlToken(content, number) for number, content in enumerate([*TOKENS, "<|python_tag|>"])]
XML = (
    "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
FORMS = {
    "hermes": "<tool_call>\n{{ call.function | tojson }}\n</tool_call>",
    "qwen-xml": "<tool_call>\n<function={{ call.function.name }}>\n" + XML,
    "llama3-json": '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}',
    "pythonic": "[{{ call.function.name }}({% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }}"
    "{% endfor %})]",
    "seed-xml": "<seed:tool_call>\n<function={{ call.function.name }}>\n"
    "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}"
    "</function>\n</seed:tool_call>",
    "minimax-xml": '<minimax:tool_call>\n<invoke name="{{ call.function.name }}">\n'
    '{% for k, v in call.function.arguments | items %}<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}'
    "</invoke>\n</minimax:tool_call>",
    "glm-xml": "<tool_call>{{ call.function.name }}\n{% for k, v in call.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "mistral": "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    "mistral-json": '[TOOL_CALLS][{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}]',
    "gemma4": "<|tool_call>call:{{ call.function.name }}{{ '{' }}"
    '{% for k, v in call.function.arguments | items %}{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}}<tool_call|>',
    "none": "<call:{{ call.function.name }}/>",
}
LLAMA_TAG = '<|python_tag|>{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'


def template(call: str, opening: str = "", closed: str = "") -> ChatTemplate:
    """opening: what ends the prompt.  closed: what stands in its place before an answer that is known."""
    source = (
        "{% for message in messages %}<|head|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}" + closed + "{% endif %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant\n" + opening + "{% endif %}"
    )
    return ChatTemplate(source, CONTROLS)


@in_turns("form", "opening", full=1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("opening", "closed"), [("", ""), ("<think>\n", "<think>\n\n</think>\n\n"), ("<think>\n", "")])
async def test_the_form_is_the_one_that_the_template_writes(form: str, opening: str, closed: str) -> None:
    made = template(FORMS[form], opening, closed)
    assert await detect_call_form(made) == form
    assert detect_reasoning(made) == ("think" if closed else "none")
    await made.aclose()


@pytest.mark.parametrize("form", ["seed-xml", "minimax-xml", "qwen-xml", "hermes", "glm-xml"])
async def test_the_form_is_the_one_whose_tags_are_tokens(form: str) -> None:
    """Tags that are tokens of their own are not seen by the parsers of other forms, which accept calls without tags."""
    tags = ["seed:tool_call", "minimax:tool_call"]
    more = [f"<{end}{tag}>" for tag in tags for end in ("", "/")]
    controls = [*CONTROLS, *(ControlToken(tag, 100 + number) for number, tag in enumerate(more))]
    made = ChatTemplate(template(FORMS[form]).source, controls)
    assert await detect_call_form(made) == form
    await made.aclose()


async def test_a_control_token_may_be_part_of_it() -> None:
    made = template(LLAMA_TAG)
    assert await detect_call_form(made) == "llama3-json"
    await made.aclose()


async def test_a_template_may_take_arguments_as_objects_only_and_say_so() -> None:
    """It looks whether they are text in order to refuse that, as templates of Qwen3.8 do."""
    refuses = "{% if call.function.arguments is string %}{{ raise_exception('parse them') }}{% endif %}"
    made = template(refuses + FORMS["qwen-xml"])
    assert made.wants_argument_text
    assert await detect_call_form(made) == "qwen-xml"
    await made.aclose()


async def test_a_template_may_read_every_description() -> None:
    described = "{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}"
    made = ChatTemplate(described + template(FORMS["hermes"]).source, CONTROLS)
    asked = {"messages": [{"role": "user", "content": "Hello"}]}
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert join_rendered(await made.render(**asked, tools=tools)).startswith("// <|head|>")
    await made.aclose()


async def test_ids_of_calls_are_short_where_a_template_refuses_longer_ones(tmp_path: Path) -> None:
    refuses = "{% if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}[ID]{{ call.id }}"
    source = template(refuses + FORMS["mistral"]).source + "{{ messages[-1].tool_call_id }}"
    text = Text.load(small.write(tmp_path, source))
    await text.check()
    call = ToolCall("call_" + "7" * 24, "callqz", "{}")
    result = ChatMessage("tool", "words", answered_call_id=call.id)
    conversation = Conversation((ChatMessage("user", "Hello"), ChatMessage("assistant", calls=(call,)), result))
    written = join_rendered(await text.render_conversation(conversation))
    called = re.findall(r"\[ID\]([a-z0-9]{9})\[TOOL_CALLS\]", written)
    assert called == [written[-9:]]
    await text.aclose()


async def test_arguments_are_text_where_a_template_encodes_what_is_none() -> None:
    """If JSON of an object is marked as safe, the template would escape the quotes of all text around it."""
    encodes = (
        "{% set written = call.function.arguments %}"
        "{% if written is not string %}{% set written = written | tojson | safe %}{% endif %}"
        """[TOOL_CALLS][{{ '{"name": "' + call.function.name + '", "arguments": ' + written + '}' }}]"""
    )
    made = template(encodes.replace("written", "arguments"))
    assert made.wants_argument_text
    assert await detect_call_form(made) == "mistral-json"
    await made.aclose()


@pytest.mark.parametrize(
    ("tags", "name"), [(("<seed:think>", "</seed:think>"), "seed"), (("[THINK]", "[/THINK]"), "mistral")]
)
async def test_tags_of_reasoning_are_those_that_the_template_writes(tags: tuple[str, str], name: str) -> None:
    made = template(FORMS["seed-xml"], tags[0], "".join(tags))
    assert (await detect_call_form(made), detect_reasoning(made)) == ("seed-xml", name)
    await made.aclose()


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no tools') }}", "{{ nothing.at.all }}", "{{ messages[0].content }}"]
)
async def test_a_template_without_calls_has_no_form(source: str) -> None:
    made = ChatTemplate(source, CONTROLS)
    assert (await detect_call_form(made), detect_reasoning(made)) == ("none", "none")
    await made.aclose()


async def test_the_small_one_is_as_qwens() -> None:
    made = ChatTemplate(small.TEMPLATE, CONTROLS)
    assert (await detect_call_form(made), detect_reasoning(made)) == ("hermes", "think")
    await made.aclose()
