"""Why prompts were not restored: where each one differs from the sequences that are kept.

A divergence in a slot is found when the request opens its slot, against the world as it was then. A divergence in a
lookup is what the store has found. Both serve /debug/misses and the metrics only: no decision uses them, and neither a
state nor a trace holds them.
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

ABSENT = frozenset(("empty_store", "nothing_shared_on_device", "too_short"))  # reasons of a place without rows


@define
class CacheMisses:
    """The divergences of live requests, by request.

    lookup_divergences: what lookups in the store have found; an entry is removed when its request ends.
    """

    lookup_divergences: MutableMapping[RequestId, Divergence]
    settings: Settings
    # Only of live requests.
    _slot_divergences: dict[RequestId, Divergence | None] = field(factory=dict[RequestId, "Divergence | None"])

    def observe(self, outs: tuple[Output, ...], before: World) -> None:
        """Note the divergence of every request that opens its slot with these effects."""
        for out in outs:
            match out:
                case EffectRequest(request, OpenSlot() as opening) if request not in self._slot_divergences:
                    self._slot_divergences[request] = find_slot_divergence(opening, before)

    def find_divergence(self, request: RequestId, report: Report) -> Divergence | None:
        """Return where a request that ends left what is kept, or None. Forgets the request.

        A divergence before the rows that were restored in the end is no miss.
        """
        found = [self._slot_divergences.pop(request, None), self.lookup_divergences.pop(request, None)]
        if was_compressed(report):
            return None  # positions are those of another prompt
        if is_fully_restored(report, self.settings):
            return None
        there = [
            divergence for divergence in found if divergence is not None and divergence.at >= report.restored_tokens
        ]
        return max(there, key=lambda divergence: divergence.at, default=None)


def was_compressed(report: Report) -> bool:
    """Return whether the prompt was compressed, so that its positions are those of another prompt."""
    return report.compression is not None and not report.compression.why_not


def is_fully_restored(report: Report, settings: Settings) -> bool:
    """Return whether all rows were restored that can be, and at least one. The last token is always computed."""
    return 0 < report.restored_tokens >= round_down_to_block(settings, report.prompt_tokens - 1)


def explain_miss(report: Report, diverged: Divergence | None, settings: Settings) -> str:
    """Return why not more of a prompt was restored; "" if nothing was missed.

    `Report.miss` is the answer of the place that was asked last: the slots, or the store. It needs two corrections.
    First, that place may have had nothing while another one had rows that were restored. Second, a prompt that
    continues a kept sequence has new tokens at its end, which no place can have. Neither is a miss. Where a kept
    sequence differs from the prompt before its end, that difference is the reason (`diverged_at`).

    diverged: where the prompt differs from the most similar kept sequence; None if it only continues it.
    """
    reason, _, number = report.miss.partition(":")
    if was_compressed(report):
        return report.miss
    if is_fully_restored(report, settings):
        return ""
    if reason in ABSENT and diverged is not None:
        return f"diverged_at:{diverged.at}"
    if report.restored_tokens and (reason in ABSENT or (number and int(number) <= report.restored_tokens)):
        return "" if diverged is None else f"diverged_at:{diverged.at}"
    return report.miss


def find_slot_divergence(opening: OpenSlot, world: World) -> Divergence | None:
    """Return where the prompt differs from the most similar sequence of a slot; None if no whole block is missing.

    If the opened slot keeps rows, they are those of the most similar sequence, so only what follows them is compared.
    If it keeps none, all slots are compared: each differs within its first block.
    """
    prompt = opening.prompt
    slots = world.slots.slots
    if opening.keep >= round_down_to_block(world.settings, len(prompt) - 1):
        return None
    looked_at = [slots[opening.source]] if opening.keep else slots
    rows = [
        get_resident_tokens(slot, world.requests, world.settings)
        for slot in looked_at
        if find_row_salt(slot, world.requests) == opening.salt
    ]
    return find_longest_divergence(rows, prompt, opening.keep)


def find_longest_divergence(sequences: Sequence[Tokens], prompt: Tokens, common: int = 0) -> Divergence | None:
    """Return the last divergence from any of these sequences. A sequence that only ends before the other does not
    diverge. common: tokens that all of them are known to have in common with the prompt.
    """
    rest = prompt[common:]
    left = [(common + count_common_tokens(rows[common:], rest), rows) for rows in sequences]
    there = [(at, rows) for at, rows in left if at < min(len(rows), len(prompt))]
    at, rows = max(there, key=itemgetter(0), default=(0, ()))
    return Divergence(at, rows[at : at + MAX_DIVERGED_TOKENS], "device") if there else None
