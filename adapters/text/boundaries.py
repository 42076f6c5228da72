"""Message boundaries: the positions in a prompt's tokens at which messages open. Prompts are shared up to these.

The problem: templates do not say how they open a message. The idea: the template renders small conversations whose
contents are known.

1. The text between two contents closes one message and opens the next.
2. The text after the last content, where no answer is to follow, only closes a message.
3. The difference is how a message opens.

The marker of a message is the first control token of this opening (`<|im_start|>`, `<start_of_turn>`, `[INST]`). One
marker may therefore stand for every role. A template without control tokens has text as its marker (`### User:`), as
the tokens into which it is cut.

A boundary is the position just past a marker. A marker may also stand where no message opens, for example because a
client typed it. This is one more position to cut at and does no harm. So markers need no matching end: every one is
found.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any, TypeAlias

from attrs import frozen

from adapters.text.template import ChatTemplate, ControlToken, Rendered, TemplateFailed, TemplateRefused
from adapters.text.tokenizer import Tokenizer
from effects.ids import Tokens

MAX_BOUNDARIES = 8192  # in one prompt
TOKEN_BYTES = 4  # a token in a packed array
# Characters of a marker that is text.
MIN_MARKER_CHARS = 2
MAX_MARKER_CHARS = 200

# A rendered conversation in units that can be compared: control tokens, and single characters.
Units: TypeAlias = "Sequence[ControlToken | str]"
Message: TypeAlias = Mapping[str, Any]

# Contents of the small conversations. No template writes such words itself.
SYSTEM = "sysqz words"
USER = "firstqz words"
ASSISTANT = "secondqz words"
AGAIN = "thirdqz words"
CALL = "callqz"
TOOL = "toolqz words"
# Neighbours with which a text marker is tokenized.
BEFORE = ("", "x", "x.", "1", "x\n")
AFTER = ("", "x", "1", " x", "\n", "\n\nx", "#", "<")


@frozen
class MessageOpenings:
    """The markers that open messages in one template. No marker is empty."""

    markers: tuple[Tokens, ...] = ()

    def find_boundaries(self, prompt: Tokens) -> Tokens:
        """Return the first 8,192 positions just past a marker, ascending. Token ids must be below 2**32."""
        if not self.markers:
            return ()
        packed = array("I", prompt).tobytes()
        found = set(
            chain.from_iterable(iterate_marker_ends(packed, array("I", marker).tobytes()) for marker in self.markers)
        )
        return tuple(sorted(found)[:MAX_BOUNDARIES])


def iterate_marker_ends(packed: bytes, marker: bytes) -> Iterator[int]:
    """Yield the token position after each occurrence of a marker, at most 8,192 of them."""
    start = found = 0
    while found < MAX_BOUNDARIES and (at := packed.find(marker, start)) >= 0:
        start = at + 1
        if at % TOKEN_BYTES == 0:
            yield (at + len(marker)) // TOKEN_BYTES
            start = at + TOKEN_BYTES
            found += 1


async def find_message_openings(template: ChatTemplate, tokenizer: Tokenizer) -> MessageOpenings:
    """Render small conversations and return the markers that open messages. It has none where none can be found."""
    user = {"role": "user", "content": USER}
    assistant = {"role": "assistant", "content": ASSISTANT}
    talk = await render_units(template, [user, assistant, {"role": "user", "content": AGAIN}])
    closed = units_after(await render_units(template, [user], generate=False), USER)
    answered = units_after(await render_units(template, [user, assistant], generate=False), ASSISTANT)
    markers = [
        *find_markers(units_between(talk, ASSISTANT, AGAIN), (answered, closed), tokenizer),
        *find_markers(units_between(talk, USER, ASSISTANT), (closed,), tokenizer),
        *find_markers(units_after(talk, AGAIN), (closed,), tokenizer),
    ]
    begun = talk[: max(0, find_last(talk, USER))]
    for gap, start in ((await units_before_system(template), begun), (await units_before_tool(template), ())):
        written = [unit.id for unit in gap if isinstance(unit, ControlToken)]
        own = [unit.id for unit in gap[closing_length(gap, start) :] if isinstance(unit, ControlToken)]
        if own and not any((token,) in markers for token in written):
            markers.append((own[-1],))
    return MessageOpenings(tuple(dict.fromkeys(markers)))


async def units_before_system(template: ChatTemplate) -> Units:
    """Return what the template writes before a system message."""
    units = await render_units(template, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}])
    return units[: max(0, find_last(units, SYSTEM))]


async def units_before_tool(template: ChatTemplate) -> Units:
    """Return what the template writes between a tool call and the tool's answer."""
    function = {"name": CALL, "arguments": {"place": CALL}}
    call = {"id": "call12345", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": USER},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "name": CALL, "content": TOOL},
    ]
    return units_between(await render_units(template, messages), CALL, TOOL)


async def render_units(template: ChatTemplate, messages: Sequence[Message], *, generate: bool = True) -> Units:
    """Render messages into comparable units. Returns no units where the template refuses or fails."""
    try:
        pieces: Rendered = await template.render(messages, generate=generate)
    except (TemplateRefused, TemplateFailed):
        return ()
    return [unit for piece in pieces for unit in ((piece,) if isinstance(piece, ControlToken) else piece)]


def find_last(units: Units, text: str) -> int:
    """Return the position at which `text` begins for the last time, or -1."""
    wanted = list(text)
    return next((at for at in range(len(units) - len(text), -1, -1) if units[at : at + len(text)] == wanted), -1)


def units_after(units: Units, text: str) -> Units:
    """Return the units after the last occurrence of `text`. Empty where `text` does not occur."""
    at = find_last(units, text)
    return units[at + len(text) :] if at >= 0 else ()


def units_between(units: Units, first: str, second: str) -> Units:
    """Return the units between the last occurrences of two texts. Empty where they do not follow each other."""
    start = find_last(units, first)
    stop = find_last(units, second)
    return units[start + len(first) : stop] if 0 <= start < stop else ()


def closing_length(gap: Units, closing: Units) -> int:
    """Return how many units of `gap` repeat what closes a message. White space is not compared."""
    reached = 0
    wanted = [unit for unit in closing if not is_blank(unit)]
    for at, unit in enumerate(gap):
        if is_blank(unit):
            continue
        if not wanted or unit != wanted.pop(0):
            break
        reached = at + 1
    return reached


def is_blank(unit: ControlToken | str) -> bool:
    return isinstance(unit, str) and unit.isspace()


def find_markers(gap: Units, closings: Sequence[Units], tokenizer: Tokenizer) -> list[Tokens]:
    """Return the markers that open the message after `gap`.

    The marker is the first control token that closes nothing, or else the last control token of the gap. A gap without
    control tokens gives its text, once for each way in which the text may be cut into tokens.
    """
    closed = max(closing_length(gap, closing) for closing in closings)
    controls = [unit.id for unit in gap if isinstance(unit, ControlToken)]
    opening = [unit.id for unit in gap[closed:] if isinstance(unit, ControlToken)]
    if controls:
        return [(opening[0] if opening else controls[-1],)]
    return encode_text_markers("".join(map(str, gap[closed:])), tokenizer)


def encode_text_markers(opening: str, tokenizer: Tokenizer) -> list[Tokens]:
    """Return the token sequences that cover a text marker, for any neighbours of it.

    A sequence counts only if it covers nothing of the neighbours except white space.
    """
    text = opening.strip()
    if not MIN_MARKER_CHARS <= len(text) <= MAX_MARKER_CHARS:
        return []
    lead = opening[: opening.index(text)]
    tail = opening[opening.index(text) + len(text) :]
    found: dict[Tokens, None] = {}
    for before, after in product(BEFORE, AFTER):
        start = len(before + lead)
        encoded = tokenizer.plain.encode(before + lead + text + tail + after, add_special_tokens=False)
        taken = [at for at, (begin, other) in enumerate(encoded.offsets) if begin < start + len(text) and other > start]
        first = encoded.offsets[taken[0]][0]
        last = encoded.offsets[taken[-1]][1]
        around = (before + lead)[first:] + (tail + after)[: max(0, last - start - len(text))]
        if not around.strip():
            found[tuple(encoded.ids[at] for at in taken)] = None
    return [
        opener for opener in found if not any(opener != other and opener[-len(other) :] == other for other in found)
    ]
