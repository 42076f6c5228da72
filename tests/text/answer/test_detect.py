"""Which form tool calls and reasoning have is found in what a chat template writes of a known call."""

from __future__ import annotations

import pytest

from adapters.text.answer.detect_call_form import detect_call_form, detect_reasoning
from adapters.text.template import ChatTemplate, ControlToken
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("opening", "closed"), [("", ""), ("<think>\n", "<think>\n\n</think>\n\n"), ("<think>\n", "")])
async def test_the_form_is_the_one_that_the_template_writes(form: str, opening: str, closed: str) -> None:
    made = template(FORMS[form], opening, closed)
    assert await detect_call_form(made) == form
    assert detect_reasoning(made) == ("think" if closed else "none")
    await made.aclose()


async def test_a_control_token_may_be_part_of_it() -> None:
    made = template(LLAMA_TAG)
    assert await detect_call_form(made) == "llama3-json"
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
