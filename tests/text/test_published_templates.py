"""Templates that are published with models: what they render is what transformers renders of the same conversation.

Published templates are not part of this repository. `REKINDLE_TEMPLATES` names a folder with some, as NAME.jinja.
Templates of our own, which do what published ones do, are always tried.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from adapters.text.answer.detect_call_form import detect_call_form, detect_reasoning
from adapters.text.conversation import (
    ChatMessage,
    Conversation,
    FunctionTool,
    ToolCall,
    build_template_variables,
    iterate_completed,
)
from adapters.text.template import ChatTemplate, ControlToken, TemplateFailed, TemplateRefused, join_rendered
from tests.text import small

FOLDER = os.environ.get("REKINDLE_TEMPLATES")
PUBLISHED = {path.stem: path.read_text() for path in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
# The beginning of a file's name, and the forms of calls and reasoning that its template writes.
FORMS: Mapping[str, tuple[str, str]] = {
    "gemma4": ("gemma4", "gemma4"),
    "google-gemma-4": ("gemma4", "gemma4"),
    "gemma3": ("none", "none"),
    "ByteDance-Seed": ("seed-xml", "seed"),
    "openai-gpt-oss": ("harmony", "none"),
    "GLM-4": ("glm-xml", "think"),
    "Laguna": ("glm-xml", "think"),
    "poolside-Laguna": ("glm-xml", "think"),
    "MiniMax-M2": ("minimax-xml", "think"),
    "MiMo": ("hermes", "none"),
    "Mistral": ("mistral", "none"),
    "mistral-common-v11_think": ("mistral", "think"),
    "mistral-common-v13_think": ("mistral", "mistral"),
    "mistral-common-v13_image_think": ("mistral", "mistral"),
    "mistral-common-v15_think": ("mistral", "mistral"),
    "mistral-common-v15_image_think": ("mistral", "mistral"),
    "mistral-common-v1": ("mistral", "none"),
    "mistral-common": ("mistral-json", "none"),
    "mistralai-Mistral-Nemo": ("mistral-json", "none"),
    "mistralai-Ministral": ("mistral", "mistral"),
    "unsloth-mistral-Devstral": ("mistral", "none"),
    "qwen3.": ("qwen-xml", "think"),
    "Qwen3.": ("qwen-xml", "think"),
    "Qwen3-Coder": ("qwen-xml", "none"),
    "Qwen-Qwen2.5": ("hermes", "none"),
    "Qwen-": ("hermes", "think"),
    "NousResearch-Hermes": ("hermes", "none"),
    "meta-llama": ("llama3-json", "none"),
    "DeepSeek-V": ("none", "none"),
    "deepseek-ai": ("none", "think"),
    "llama-cpp-deepseek-r1": ("none", "think"),
}
# What is a token of its own in the vocabularies of these models.
WORDS = r"</?(?:think|tool_call|tool_response|arg_key|arg_value|assistant|sop|minimax:tool_call|seed:[a-z_]+)>"
MARKS = re.compile(rf"<\|[\w\"]+\|?>|<\w+\|>|\[/?[A-Z_]+\]|{WORDS}|\]~!?b\[?|\[e~\[")
TOOLS = (
    FunctionTool(
        "write_file",
        "Writes a file, \u00e4 <b>quoted</b> & all.",
        {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "Where to."},
                "mode": {"type": "string", "enum": ["new", "more"]},
                "lines": {"type": "array", "items": {"type": "string"}},
                "options": {
                    "type": "object",
                    "properties": {"depth": {"type": "integer"}, "force": {"type": "boolean"}},
                    "required": ["depth"],
                },
                "count": {"type": "number", "nullable": True, "default": 3},
            },
            "required": ["path", "lines"],
        },
    ),
    FunctionTool("now", "Says what time it is.", {"type": "object", "properties": {}}),
)
SYSTEM = ChatMessage("system", "Be brief, \u00fcberall.")
ASK = ChatMessage("user", "What is in a.txt?\n")
ARGUMENTS = (
    '{"path": "a \\"b\\".txt", "lines": ["x <y>", "\u00e9"], "options": {"depth": 2, "force": true}, "count": 1.5}'
)
CALL = ChatMessage("assistant", "", calls=(ToolCall("call12345", "write_file", ARGUMENTS),))
THOUGHT = ChatMessage("assistant", "", "I have to look.", (ToolCall("call12346", "now", "{}"),))
BOTH = ChatMessage("assistant", "Two.", calls=(*CALL.calls, *THOUGHT.calls))
RESULT = ChatMessage("tool", '{"ok": true}', answered_call_id="call12345")
TIME = ChatMessage("tool", "noon \u2713", answered_call_id="call12346")
SAID = ChatMessage("assistant", "It is empty.", "Well.")
CONVERSATIONS: dict[str, Conversation] = {
    "a question": Conversation((ASK,)),
    "with rules": Conversation((SYSTEM, ASK)),
    "several turns": Conversation((SYSTEM, ASK, SAID, ASK, SAID, ASK)),
    "tools": Conversation((ASK,), TOOLS),
    "tools and rules": Conversation((SYSTEM, ASK), TOOLS),
    "a call": Conversation((SYSTEM, ASK, CALL, RESULT), TOOLS),
    "a call after reasoning": Conversation((ASK, THOUGHT, TIME), TOOLS),
    "calls in turns": Conversation((ASK, CALL, RESULT, THOUGHT, TIME, SAID, ASK), TOOLS),
    "two calls at once": Conversation((ASK, BOTH, RESULT, TIME), TOOLS),
    "a tool that is hardly described": Conversation((ASK,), (FunctionTool("look"), TOOLS[0])),
    "reasoning wanted": Conversation((ASK,), TOOLS, variables={"enable_thinking": True, "thinking": True}),
    "no reasoning": Conversation((ASK,), variables={"enable_thinking": False, "thinking": False}),
    "much reasoning": Conversation((ASK,), variables={"reasoning_effort": "high"}),
    "an answer that is known": Conversation((ASK, SAID), generate=False),
    "a loop of an agent": Conversation((SYSTEM, ASK, CALL, RESULT, THOUGHT, TIME, CALL, RESULT), TOOLS),
    "a call that is known": Conversation((SYSTEM, ASK, BOTH), TOOLS, generate=False),
}
# What published templates do: macros that call themselves, namespaces, looks ahead and back, sorted members, JSON as
# it is, refusals, dates, texts that are taken apart at control tokens.
OURS = """
{%- macro show(value) -%}
  {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
  {%- elif value is boolean %}{{ 'yes' if value else 'no' }}
  {%- elif value is mapping -%}
    { {%- for key, own in value | dictsort %}{{ key }}:{{ show(own) }}{{ ',' if not loop.last }}{% endfor -%} }
  {%- elif value is iterable %}[{% for own in value %}{{ show(own) }}{% if not loop.last %},{% endif %}{% endfor %}]
  {%- else %}{{ value }}{% endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, open=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token | default('') }}
{%- if messages[0].role == 'system' %}{{ '<|turn>rules\\n' ~ messages[0].content | trim ~ '<turn|>\\n' }}{% endif %}
{%- if tools %}<|turn>tools {{ strftime_now('%Y-%m')[:4] | length }}
{%- for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }} {{ tool.function.parameters.properties | tojson(indent=2) | upper | length }}
{%- for name, spec in tool.function.parameters.properties.items() %} {{ name }}={{ show(spec) }}{% endfor %}
{%- endfor %}<turn|>
{% endif %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {{- '<|turn>model\\n' if not ns.open }}
    {%- set content = m.content.split('</think>')[-1].lstrip('\\n') if '</think>' in m.content else m.content %}
    {%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}
    {%- for call in m.tool_calls or [] %}
      {{- '<|tool_call>call:' + call.function.name + show(call.function.arguments) + '<tool_call|>' }}
    {%- endfor %}
    {{- content }}
    {%- set ns.open = m.tool_calls is defined and loop.nextitem is defined and loop.nextitem.role == 'tool' %}
    {{- '<turn|>\\n' if not ns.open }}
  {%- elif m.role == 'tool' %}
    {%- if loop.first or loop.previtem.role not in ['tool', 'assistant'] %}{{ raise_exception('no call') }}{% endif %}
    {{- '<|tool_response>' ~ (m.name or 'unknown') ~ show({'value': m.content}) ~ '<tool_response|>' }}
  {%- elif m.role == 'user' %}
    {%- set off = enable_thinking is defined and not enable_thinking %}
    {{- '<|turn>user\\n' ~ m.content | trim ~ ('/nothink' if off else '') ~ '<turn|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' if not ns.open }}{{ reasoning_effort | default('') }}{% endif %}"""
EVERY = {"ours": OURS, **PUBLISHED}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def controls_of(source: str) -> list[ControlToken]:
    found = sorted({*MARKS.findall(source), *VARIABLES.values()})
    return [ControlToken(content, number) for number, content in enumerate(found)]


def forms_of(name: str) -> tuple[str, str]:
    """Return the forms of calls and reasoning that a published template writes."""
    return next(forms for start, forms in FORMS.items() if name.startswith(start))


@functools.cache
def make_tokenizer() -> Any:
    """Return a tokenizer of transformers, which renders any template that it is given."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow to import

    return PreTrainedTokenizerFast(tokenizer_object=small.train(), **VARIABLES)


def rendered_by_transformers(source: str, variables: Mapping[str, Any], generate: bool) -> str:
    how = {"chat_template": source, "add_generation_prompt": generate, "tokenize": False}

    def apply(messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        return str(make_tokenizer().apply_chat_template(messages, **how, **more))

    try:
        return apply(**variables)
    except TypeError:
        if variables.get("tools"):
            raise
        return apply(**variables, tools=[])  # it iterates over tools, which are None unless they are given
    except TemplateError as error:
        refused = error
    for completed in iterate_completed(variables):
        with contextlib.suppress(TemplateError):
            return apply(**completed)  # it takes no text, or reads every description
    raise refused


@pytest.mark.parametrize("name", EVERY)
async def test_conversations_are_rendered_as_transformers_does(name: str) -> None:
    source = EVERY[name]
    made = ChatTemplate(source, controls_of(source), VARIABLES)
    refused = []
    for case, conversation in CONVERSATIONS.items():
        variables = build_template_variables(conversation, made.wants_argument_text)
        try:
            ours = join_rendered(await made.render(**variables, generate=conversation.generate))
        except (TemplateRefused, TemplateFailed):
            refused.append(case)
            with pytest.raises((TemplateError, TypeError, ValueError)):
                rendered_by_transformers(source, variables, conversation.generate)
            continue
        assert ours == rendered_by_transformers(source, variables, conversation.generate), case
    await made.aclose()
    assert name != "ours" or not refused
    assert len(refused) < len(CONVERSATIONS) // 2, refused


@pytest.mark.skipif(not PUBLISHED, reason="REKINDLE_TEMPLATES names no folder with published templates")
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith(tuple(FORMS))])
async def test_forms_are_those_of_the_documents(name: str) -> None:
    made = ChatTemplate(PUBLISHED[name], controls_of(PUBLISHED[name]), VARIABLES)
    assert (await detect_call_form(made), detect_reasoning(made)) == forms_of(name)
    await made.aclose()
