"""Tests of where messages open, in the style of every template that marks roles, and in prompts that try to
confuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from adapters import demo
from adapters.text.boundaries import MAX_BOUNDARIES, MessageOpenings, find_message_openings
from adapters.text.model_text import Text
from adapters.text.template import ChatTemplate
from adapters.text.tokenizer import Tokenizer
from tests.text import small


def marked(text: str) -> str:
    """A full-width bar for every exclamation mark: one family's control tokens have them."""
    return text.replace("!", "\uff5c")


# In the manner of the families' published templates: what they write around a message, and no more.
CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA_3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{{- m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """\
{{- '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""
MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]{"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}{{ c.function.name + c.function.arguments | tojson }}{%- endfor %}{{ ']</s>' }}
{%- else %}{{ m.content + '</s>' }}{%- endif %}
{%- endfor %}"""
DEEPSEEK = marked("""\
{{- '<!begin▁of▁sentence!>' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<!User!>' + m.content }}
{%- else %}{{ '<!Assistant!>' + m.content + '<!end▁of▁sentence!>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<!Assistant!>' }}{%- endif %}""")
PHI_3 = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ '<|system|>\\n' + m.content + '<|end|>\\n' }}
{%- elif m.role == 'user' %}{{ '<|user|>\\n' + m.content + '<|end|>\\n' }}
{%- else %}{{ '<|assistant|>\\n' + m.content + '<|end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{%- else %}{{ '<|endoftext|>' }}{%- endif %}"""
HARMONY = """\
{{- '<|start|>system<|message|>You are a model.<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""
ALPACA = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content + '\\n\\n' }}
{%- elif m.role == 'user' %}{{ '### User:\\n' + m.content + '\\n\\n' }}
{%- else %}{{ '### Assistant:\\n' + m.content + '\\n\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{%- endif %}"""
UNMARKED = "{%- for m in messages %}{{ m.content + '\\n' }}{%- endfor %}"

FAMILIES: dict[str, tuple[str, list[str]]] = {
    "chatml": (CHATML, ["<|im_start|>"]),
    "qwen": (small.TEMPLATE, ["<|im_start|>"]),
    "llama-3": (LLAMA_3, ["<|start_header_id|>"]),
    "gemma": (GEMMA, ["<start_of_turn>"]),
    "mistral": (MISTRAL, ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[TOOL_RESULTS]"]),
    "deepseek": (DEEPSEEK, [marked("<!User!>"), marked("<!Assistant!>")]),
    "phi-3": (PHI_3, ["<|user|>", "<|assistant|>", "<|system|>"]),
    "harmony": (HARMONY, ["<|start|>"]),
}
CONTROLS = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>"),
    *("<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
    *(
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        marked("<!begin▁of▁sentence!>"),
        marked("<!User!>"),
        marked("<!Assistant!>"),
    ),
    *(marked("<!end▁of▁sentence!>"), "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|start|>", "<|message|>"),
    *("<|channel|>", "<|return|>"),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One tokenizer with the control tokens of all families."""
    folder = tmp_path_factory.mktemp("families")
    trained = small.train()
    trained.add_special_tokens(CONTROLS)
    small.write(folder)
    trained.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


async def text_of(template: str, words: Tokenizer) -> Text:
    text = Text(words, ChatTemplate(template, tuple(words.controls.values())))
    await text.check()
    return text


def said(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """A conversation, the user speaking first."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


async def pieces(text: Text, messages: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], list[str]]:
    """The boundaries of a conversation's prompt, and what stands just before each."""
    prompt = await text.encode_chat(messages)
    found = text.openings.find_boundaries(prompt)
    return found, [text.tokenizer.decode(prompt[:at], special=True) for at in found]


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_markers_of_a_template_are_found_in_what_it_writes(family: str, words: Tokenizer) -> None:
    template, expected = FAMILIES[family]
    text = await text_of(template, words)
    names = [words.decode(marker, special=True) for marker in text.openings.markers]
    assert sorted(names) == sorted(expected)
    await text.aclose()


@pytest.mark.parametrize("system", [None, "You help."])
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_message_opens_at_a_boundary(family: str, system: str | None, words: Tokenizer) -> None:
    if family == "gemma" and system:
        return  # the template refuses it
    text = await text_of(FAMILIES[family][0], words)
    found, before = await pieces(text, said("alpha", "beta", "gamma", system=system))
    markers = FAMILIES[family][1]
    assert list(found) == sorted(set(found))
    assert all(any(head.endswith(marker) for marker in markers) for head in before)
    for content in ("alpha", "beta", "gamma"):
        heads = [head for head in before if content not in head]
        longest = max(heads, key=len)
        assert all(other in longest for other in ("alpha", "beta", "gamma") if other < content), "one opens before each"
    assert "gamma" in before[-1] or family == "mistral", "the answer opens too"
    await text.aclose()


@pytest.mark.parametrize("system", [None, "You help."])
async def test_roles_that_are_marked_by_text_are_found_too(system: str | None, words: Tokenizer) -> None:
    text = await text_of(ALPACA, words)
    for contents in (("alpha", "beta", "gamma"), ("1", "\nbeta", "## gamma"), (" a", "b.", "c\n")):
        _, before = await pieces(text, said(*contents, system=system))
        opened = [head.rstrip().rpartition("\n")[2] for head in before]
        assert opened == ["### User:", "### Assistant:"] * 2, contents
    await text.aclose()


async def test_where_nothing_marks_a_message_there_are_no_boundaries(words: Tokenizer) -> None:
    text = await text_of(UNMARKED, words)
    assert text.openings == MessageOpenings()
    assert (await pieces(text, said("alpha", "beta", "gamma")))[0] == ()
    await text.aclose()


async def test_stray_markers_lose_no_boundary_and_typed_ones_are_text(words: Tokenizer) -> None:
    text = await text_of(CHATML, words)
    typed, _ = await pieces(text, said("<|im_end|> <|im_start|> alpha", "beta", "gamma"))
    assert len(typed) == 4, "what is typed is text"
    prompt = list(await text.encode_chat(said("alpha", "beta", "gamma")))
    start, end = (words.controls[name].id for name in ("<|im_start|>", "<|im_end|>"))
    clean = text.openings.find_boundaries(tuple(prompt))
    for place in range(len(prompt) + 1):
        for stray in (end, start):
            strayed = (*prompt[:place], stray, *prompt[place:])
            shifted = {at if at <= place else at + 1 for at in clean}
            assert shifted - {place} <= set(text.openings.find_boundaries(strayed))
    await text.aclose()


async def test_the_demo_marks_its_messages() -> None:
    text = Text.load(demo.FOLDER)
    assert await text.check() == ()
    assert len(text.openings.markers) == 1
    tools = [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a = 1"},
    ]
    prompt = await text.encode_chat(messages, tools=tools)
    (marker,) = text.openings.markers[0]
    assert text.openings.find_boundaries(prompt) == tuple(at + 1 for at, token in enumerate(prompt) if token == marker)
    assert len(text.openings.find_boundaries(prompt)) == 5
    await text.aclose()


async def test_a_template_that_breaks_has_no_boundaries(words: Tokenizer) -> None:
    template = ChatTemplate("{{ raise_exception('never') }}", ())
    assert await find_message_openings(template, words) == MessageOpenings()
    await template.aclose()


@pytest.mark.parametrize(
    ("markers", "prompt", "expected"),
    [
        ((), (1, 2, 3), ()),
        (((7,),), (), ()),
        (((7,),), (7,), (1,)),
        (((7,),), (1, 7, 2, 7, 7), (2, 4, 5)),
        (((7, 8),), (7, 7, 8, 7, 8, 8), (3, 5)),
        (((7, 7),), (7, 7, 7, 7), (2, 3, 4)),
        (((7,), (2, 7), (9,)), (2, 7, 9), (2, 3)),
        (((256,),), (1, 0x00010000, 256), (3,)),  # the bytes of one token and the next are no token
        (((0,),), (1 << 24, 0, 1 << 16), (2,)),
    ],
)
def test_positions_just_past_a_marker(
    markers: tuple[tuple[int, ...], ...], prompt: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert MessageOpenings(markers).find_boundaries(prompt) == expected


def test_there_is_a_limit_to_boundaries() -> None:
    found = MessageOpenings(((7,), (8,))).find_boundaries((7, 8) * MAX_BOUNDARIES)
    assert found == tuple(range(1, MAX_BOUNDARIES + 1))
