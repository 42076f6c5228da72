"""The demo's control tokens and chat template, which turn a conversation into text. They ship with the demo."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from jinja2.sandbox import ImmutableSandboxedEnvironment

PAD, MASK, END_OF_TEXT, TURN, END_OF_TURN = "<|pad|>", "<|mask|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HIDDEN = (PAD, MASK, END_OF_TEXT, TURN, END_OF_TURN)
SHOWN = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<tools>", "</tools>", "<think>", "</think>"),
)
RESERVED = ("<|reserved_0|>", "<|reserved_1|>", "<|reserved_2|>")
CONTROLS = (*HIDDEN, *SHOWN, *RESERVED)
"""The first ids of the vocabulary, in this order. HIDDEN and RESERVED are not shown when decoding."""

UNUSED = (PAD, MASK, "<think>", "</think>", *RESERVED)
"""Never predicted: left out of the softmax while training, and at the mean of the others when shipped."""

TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}
{%- elif content is iterable %}{% for part in content %}{{ part.text if part.text is string else '' }}{% endfor %}
{%- endif %}
{%- endmacro %}
{%- set start = namespace(at=0, system='') %}
{%- if messages and messages[0].role in ['system', 'developer'] %}
{%- set start.system = text(messages[0].content) %}
{%- set start.at = 1 %}
{%- endif %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if start.system %}{{ start.system + '\\n\\n' }}{% endif %}
{{- 'These functions can be called:\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '</tools>\\nTo call one, write:\\n<tool_call>\\n{"name": function name, "arguments": JSON object}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif start.at %}
{{- '<|im_start|>system\\n' + start.system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[start.at:] %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + text(message.content) + '<|im_end|>\\n' }}
{%- elif message.role in ['system', 'developer'] %}
{{- '<|im_start|>system\\n' + text(message.content) + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + text(message.content) }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{%- if not loop.first or text(message.content) %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- raise_exception('unknown role ' + message.role | string + '; accepted: system, developer, user, assistant, tool') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_ANSWER = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
Message = Mapping[str, Any]


@frozen
class Passage:
    """Part of a training document. `content`: text, or token ids as they are. `weight`: of its tokens in the loss."""

    content: str | tuple[int, ...]
    weight: float = 0.0


Document = list[Passage]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


_TEMPLATE = _environment().from_string(TEMPLATE)


def render(messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool = False) -> str:
    """The conversation as text; with `prompt`, open for the assistant's next turn."""
    return _TEMPLATE.render(messages=messages, tools=tools, add_generation_prompt=prompt)


def conversation(messages: Sequence[Message], tools: Sequence[Message] = (), weight: float = 1.0) -> Document:
    """A document of which the model learns what the assistant says, up to and with the end of its turns."""
    parts = _ANSWER.split(render(messages, tools))
    return [Passage(part, weight if index % 2 else 0.0) for index, part in enumerate(parts) if part]


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
