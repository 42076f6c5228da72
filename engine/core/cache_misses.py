"""Where prompts leave what is kept: in a slot, as the world was when they were admitted, or as the store has found.

Observed and told, and never decided upon: neither a state nor a trace has it.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from operator import itemgetter

from attrs import define, field

from effects.all import EffectRequest
from effects.ids import RequestId, Tokens
from effects.job import Report
from effects.ports import MAX_DIVERGED_TOKENS, Divergence
from effects.prefill import OpenSlot
from states.sequences import count_common_tokens, round_down_to_block
from states.settings import Settings
from states.slots import find_row_salt, get_resident_tokens
from states.world import Output, World

ABSENT = frozenset(("empty_store", "nothing_shared_on_device", "too_short"))  # said of what a tier has not got


@define
class Misses:
    """stored: what lookups have found, by request; taken from there when it is told."""

    stored: MutableMapping[RequestId, Divergence]
    settings: Settings
    _slots: dict[RequestId, Divergence | None] = field(factory=dict[RequestId, "Divergence | None"])  # of live requests

    def observe(self, outs: tuple[Output, ...], before: World) -> None:
        """Whoever is admitted opens a slot."""
        for out in outs:
            match out:
                case EffectRequest(request, OpenSlot() as opening) if request not in self._slots:
                    self._slots[request] = in_slots(opening, before)

    def told(self, request: RequestId, report: Report) -> Divergence | None:
        """At its end. What was found short of the rows that were restored in the end is no miss."""
        found = [self._slots.pop(request, None), self.stored.pop(request, None)]
        if is_compressed(report):
            return None  # places are those of another prompt
        if has_all(report, self.settings):
            return None
        there = [one for one in found if one is not None and one.at >= report.restored_tokens]
        return max(there, key=lambda one: one.at, default=None)


def is_compressed(report: Report) -> bool:
    return report.compression is not None and not report.compression.why_not


def has_all(report: Report, settings: Settings) -> bool:
    """Were all rows there that can be restored of such a prompt, and any? Its last token is always computed."""
    return 0 < report.restored_tokens >= round_down_to_block(settings, report.prompt_tokens - 1)


def miss_of(report: Report, diverged: Divergence | None, settings: Settings) -> str:
    """Return why not more of a prompt was restored; nothing, where nothing was missed.

    The core tells what the last tier said that was asked. What that has not got is no miss where another tier had it,
    and neither is what the prompt goes on with behind everything that is kept.
    """
    reason, _, number = report.miss.partition(":")
    if is_compressed(report):
        return report.miss
    if has_all(report, settings):
        return ""
    if reason in ABSENT and diverged is not None:
        return f"diverged_at:{diverged.at}"
    if report.restored_tokens and (reason in ABSENT or (number and int(number) <= report.restored_tokens)):
        return "" if diverged is None else f"diverged_at:{diverged.at}"
    return report.miss


def in_slots(opening: OpenSlot, world: World) -> Divergence | None:
    """Where the prompt leaves the likest sequence of a slot, if whole blocks of it are missing.

    The rows that it keeps are of the likest one; where it keeps none, each differs within its first block.
    """
    prompt, slots = opening.prompt, world.slots.slots
    if opening.keep >= round_down_to_block(world.settings, len(prompt) - 1):
        return None
    looked_at = [slots[opening.source]] if opening.keep else slots
    rows = [
        get_resident_tokens(slot, world.requests, world.settings)
        for slot in looked_at
        if find_row_salt(slot, world.requests) == opening.salt
    ]
    return diverged(rows, prompt)


def diverged(sequences: Sequence[Tokens], prompt: Tokens) -> Divergence | None:
    """From the likest of them, but for those of which one only goes on where the other ends."""
    left = [(count_common_tokens(rows, prompt), rows) for rows in sequences]
    there = [(at, rows) for at, rows in left if at < min(len(rows), len(prompt))]
    at, rows = max(there, key=itemgetter(0), default=(0, ()))
    return Divergence(at, rows[at : at + MAX_DIVERGED_TOKENS], "device") if there else None
