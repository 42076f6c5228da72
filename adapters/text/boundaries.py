"""Safe boundaries: where messages open in a prompt's tokens, found by what the chat template itself writes there.

The template renders small conversations whose contents are known. What it writes between two contents closes one
message and opens the next; what it writes behind the last one, with no answer to follow, only closes it. The difference
is how a message opens. Its marker is the first control token of that (`<|im_start|>`, `<start_of_turn>`, `[INST]`), so
that one marker may stand for every role; or, in a template without, the text itself (`### User:`) as tokens.

A boundary is the position just past a marker. A marker that stands anywhere else, because somebody typed it or without
a message behind it, is one more place to cut at and does no harm. So nothing has to be matched with anything: every
marker is found, wherever the one before it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, TypeAlias

from attrs import frozen

from adapters.text.template import ChatTemplate, Control, Rendered, TemplateFailed, TemplateRefused
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MOST = 8192  # boundaries of a prompt
WIDTH = 4  # bytes of a packed token
LEAST_TEXT, MOST_TEXT = 2, 200  # letters and signs of a marker that is text

# A rendered conversation in units that can be compared: control tokens, and single characters.
Units: TypeAlias = "Sequence[Control | str]"
Message: TypeAlias = Mapping[str, Any]

SYSTEM, USER, ASSISTANT, CALL, TOOL = "sysqz words", "firstqz words", "secondqz words", "callqz", "toolqz words"
AGAIN = "thirdqz words"
BEFORE, AFTER = (
    ("", "x", "x.", "1", "x\n"),
    ("", "x", "1", " x", "\n", "\n\nx", "#", "<"),
)  # neighbours of a text marker


@frozen
class Openings:
    """How messages open: token sequences, none of which is empty."""

    markers: tuple[Tokens, ...] = ()

    def boundaries(self, prompt: Tokens) -> Tokens:
        """Positions just past each marker, ascending, the first 8,192 of them. Token ids are below 2**32."""
        if not self.markers:
            return ()
        packed = array("I", prompt).tobytes()
        found = set(chain.from_iterable(ends(packed, array("I", marker).tobytes()) for marker in self.markers))
        return tuple(sorted(found)[:MOST])


def ends(packed: bytes, marker: bytes) -> Iterator[int]:
    """Tokens up to the end of each occurrence, at most 8,192 of them."""
    start = found = 0
    while found < MOST and (at := packed.find(marker, start)) >= 0:
        start = at + 1
        if at % WIDTH == 0:
            yield (at + len(marker)) // WIDTH
            start, found = at + WIDTH, found + 1


async def find_openings(template: ChatTemplate, tokenizer: Tokenizer) -> Openings:
    """What opens messages in this template; nothing, where that cannot be told."""
    user, assistant = {"role": "user", "content": USER}, {"role": "assistant", "content": ASSISTANT}
    talk = await rendered(template, [user, assistant, {"role": "user", "content": AGAIN}])
    closed = behind(await rendered(template, [user], generate=False), USER)
    answered = behind(await rendered(template, [user, assistant], generate=False), ASSISTANT)
    markers = [
        *marker(between(talk, ASSISTANT, AGAIN), (answered, closed), tokenizer),
        *marker(between(talk, USER, ASSISTANT), (closed,), tokenizer),
        *marker(behind(talk, AGAIN), (closed,), tokenizer),
    ]
    begun = talk[: max(0, place(talk, USER))]
    for gap, start in ((await before_system(template), begun), (await before_tool(template), ())):
        written = [unit.id for unit in gap if isinstance(unit, Control)]
        own = [unit.id for unit in gap[stripped(gap, start) :] if isinstance(unit, Control)]
        if own and not any((token,) in markers for token in written):
            markers.append((own[-1],))
    return Openings(tuple(dict.fromkeys(markers)))


async def before_system(template: ChatTemplate) -> Units:
    units = await rendered(template, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}])
    return units[: max(0, place(units, SYSTEM))]


async def before_tool(template: ChatTemplate) -> Units:
    """What stands between a call and the tool's answer."""
    function = {"name": CALL, "arguments": {"place": CALL}}
    call = {"id": "call12345", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": USER},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": CALL, "content": TOOL},
    ]
    return between(await rendered(template, messages), CALL, TOOL)


async def rendered(template: ChatTemplate, messages: Sequence[Message], *, generate: bool = True) -> Units:
    """Nothing where the template will not have it."""
    try:
        pieces: Rendered = await template.render(messages, generate=generate)
    except (TemplateRefused, TemplateFailed):
        return ()
    return [unit for piece in pieces for unit in ((piece,) if isinstance(piece, Control) else piece)]


def place(units: Units, text: str) -> int:
    """Where a content begins the last time, or -1."""
    wanted = list(text)
    return next((at for at in range(len(units) - len(text), -1, -1) if units[at : at + len(text)] == wanted), -1)


def behind(units: Units, text: str) -> Units:
    at = place(units, text)
    return units[at + len(text) :] if at >= 0 else ()


def between(units: Units, one: str, other: str) -> Units:
    start, stop = place(units, one), place(units, other)
    return units[start + len(one) : stop] if 0 <= start < stop else ()


def stripped(gap: Units, closing: Units) -> int:
    """How much of a gap is as what closes a message, white space aside."""
    reached, wanted = 0, [unit for unit in closing if not blank(unit)]
    for at, unit in enumerate(gap):
        if blank(unit):
            continue
        if not wanted or unit != wanted.pop(0):
            break
        reached = at + 1
    return reached


def blank(unit: Control | str) -> bool:
    return isinstance(unit, str) and unit.isspace()


def marker(gap: Units, closings: Sequence[Units], tokenizer: Tokenizer) -> list[Tokens]:
    """What in a gap opens the message behind it: its first control token that closes nothing, or the last one there is.

    Without control tokens it is the text, in every way in which that is cut into tokens.
    """
    closed = max(stripped(gap, closing) for closing in closings)
    controls = [unit.id for unit in gap if isinstance(unit, Control)]
    opening = [unit.id for unit in gap[closed:] if isinstance(unit, Control)]
    if controls:
        return [(opening[0] if opening else controls[-1],)]
    return cut("".join(map(str, gap[closed:])), tokenizer)


def cut(opening: str, tokenizer: Tokenizer) -> list[Tokens]:
    """The tokens that cover a text and no part of its neighbours but white space, whatever those are."""
    text = opening.strip()
    if not LEAST_TEXT <= len(text) <= MOST_TEXT:
        return []
    lead, tail = opening[: opening.index(text)], opening[opening.index(text) + len(text) :]
    found: dict[Tokens, None] = {}
    for before, after in product(BEFORE, AFTER):
        start = len(before + lead)
        encoded = tokenizer.plain.encode(before + lead + text + tail + after, add_special_tokens=False)
        taken = [at for at, (one, other) in enumerate(encoded.offsets) if one < start + len(text) and other > start]
        first, last = encoded.offsets[taken[0]][0], encoded.offsets[taken[-1]][1]
        around = (before + lead)[first:] + (tail + after)[: max(0, last - start - len(text))]
        if not around.strip():
            found[tuple(encoded.ids[at] for at in taken)] = None
    return [one for one in found if not any(one != other and one[-len(other) :] == other for other in found)]
