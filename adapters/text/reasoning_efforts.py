"""Levels of reasoning effort: one list for all APIs, and which of them a checkpoint's chat template accepts.

Templates do not say what they accept, so each level is rendered once at start. A level that the template refuses is
served as the nearest one that it accepts; the answer's header says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from adapters.text.conversation import ChatMessage, Conversation, build_template_variables, build_thinking_variables
from adapters.text.template import ChatTemplate, TemplateFailed, TemplateRefused

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # ascending; `none`: the model does not think
VARIABLE = "reasoning_effort"


async def find_efforts(template: ChatTemplate, parts: bool) -> Mapping[str, str | None]:
    """Return the value that the template gets for each level. None: the template's own default.

    parts: see `build_template_variables`.
    """
    accepted = [level for level in EFFORTS if await accepts_variables(template, build_thinking_variables(level), parts)]
    return {level: find_nearest(level, accepted) for level in EFFORTS}


async def accepts_variables(template: ChatTemplate, variables: Mapping[str, Any], parts: bool) -> bool:
    """Does the template render a conversation with these variables?"""
    conversation = Conversation((ChatMessage("user", "Hello"),), variables=variables)
    rendered = build_template_variables(conversation, template.wants_argument_text, parts)
    try:
        await template.render(rendered.pop("messages"), **rendered)
    except (TemplateRefused, TemplateFailed):
        return False
    return True


def find_nearest(level: str, accepted: list[str]) -> str | None:
    """Return the nearest accepted level, the lower one of two that are equally near.

    A request to think never becomes `none`, and `none` never becomes a request to think.
    """
    if level in accepted:
        return level
    levels = [effort for effort in accepted if (effort == "none") == (level == "none")]
    rank = EFFORTS.index(level)
    return min(levels, key=lambda effort: (abs(EFFORTS.index(effort) - rank), EFFORTS.index(effort)), default=None)


def resolve_effort(conversation: Conversation, efforts: Mapping[str, str | None]) -> tuple[str | None, str | None]:
    """Return the level that the request asks for, and the level that the template gets."""
    asked: str | None = conversation.variables.get(VARIABLE)
    return asked, None if asked is None else efforts.get(asked, asked)


def apply_accepted_effort(conversation: Conversation, efforts: Mapping[str, str | None]) -> Conversation:
    """Return the conversation with the level that its template accepts."""
    asked, served = resolve_effort(conversation, efforts)
    if served == asked:
        return conversation
    rest = {name: value for name, value in conversation.variables.items() if name != VARIABLE}
    return evolve(conversation, variables=rest if served is None else {**rest, VARIABLE: served})


def describe_replaced_effort(conversation: Conversation, efforts: Mapping[str, str | None]) -> str:
    """Return what a header says of a level that is served as another one; empty where there is none."""
    asked, served = resolve_effort(conversation, efforts)
    return "" if served == asked else f"{served or 'default'}; the chat template does not accept {asked}"
