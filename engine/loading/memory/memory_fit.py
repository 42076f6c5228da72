"""Computes how many slots of which length fit into memory, from estimates, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from effects.ids import PAGE
from states.pages import MANY, SHORT_SEQUENCE

# The default numbers of slots. The first one that leaves each slot long enough is chosen.
SLOT_COUNTS = (4, 2, 1)
# Larger numbers, for slots as long as the model allows that take little of the memory.
MANY_SLOT_COUNTS = (16, 8)
# Slots take little if they take at most a quarter of it, since memory that slots keep is lost to other programs.
LITTLE = 4
# The same if slots share pages. Then slots cost little more than what their sequences take.
POOLED_SLOT_COUNTS = (64, 32, 16, 8, 4, 2, 1)
# More than this many slots are chosen only where what each slot has for itself takes little: its positional state, and
# its rows of a draft. The pool must have SHORT_SEQUENCE rows for each slot, or LEAST_PAGES if all that slots have for
# themselves takes a small part of it. How many requests run follows from what they claim (`states/pages.py`).
POOLED_SLOTS = MANY
LEAST_PAGES = 2
# There is one spare slot for this many slots.
SPARE_PART = 4
# Tokens of an agent's session. More slots of this length are worth more than longer ones.
LONG_CONTEXT = 32768
LEAST = 1024


@frozen
class DeviceNeed:
    """The memory that a device has, and the memory that is needed of it, in bytes.

    available: what it has.
    fixed: weights, buffers and checkpoints.
    row: what one more token in one slot takes. own: the part of `row` that each slot needs for itself, even where slots
    share pages.
    state: the positional state of one slot.
    once: what one position takes that all slots share, such as its sines and cosines.
    """

    name: str
    available: int
    fixed: int
    row: int
    state: int = 0
    once: int = 0
    own: int = 0

    def compute_taken(self, fit: Fit) -> int:
        """Return the bytes that this fit takes of the device."""
        whole = 0 if fit.pages else fit.slots * fit.context * (self.row - self.own)
        return self.fixed + self.once * fit.context + self.compute_own(fit) + whole + self.compute_pool(fit)

    def compute_own(self, fit: Fit) -> int:
        """Return the bytes that slots have for themselves, even where they share pages."""
        return fit.slots * (self.state + fit.context * self.own)

    def compute_pool(self, fit: Fit) -> int:
        """Return the bytes of the pages."""
        return fit.pages * PAGE * (self.row - self.own)

    def spares_memory(self, fit: Fit) -> bool:
        """Return whether the slots take at most a quarter of the memory that `fixed` leaves."""
        return self.compute_taken(fit) - self.fixed <= (self.available - self.fixed) // LITTLE


@frozen
class Fit:
    """A number of slots and their length in tokens.

    fits: whether there is memory for them, as far as can be known before the load. pages: pages of PAGE rows that the
    slots share; 0: each slot has room for the whole context. spare: further slots, for requests that begin while rows
    of ended ones are saved (`Settings.spare_slots`).
    """

    slots: int
    context: int
    fits: bool = True
    pages: int = 0
    spare: int = 0

    @property
    def rows(self) -> int:
        """The rows of all slots together."""
        return self.pages * PAGE or self.slots * self.context


def fit_slots(needs: Sequence[DeviceNeed], limit: int, slots: int = 0, context: int = 0) -> Fit:
    """Return the fit to serve with, if every slot has rows of its own.

    limit: tokens that the model was made for. slots, context: what was asked for; 0: what fits. If no number of slots
    was asked for, there are more than four if those take little. Else there are four, two or one, until each is as long
    as the model allows, or long enough.
    """
    more = [
        count for count in MANY_SLOT_COUNTS if all(need.spares_memory(Fit(count, context or limit)) for need in needs)
    ]
    tried = [
        Fit(count, longest)
        for count in ((slots,) if slots else (*more, *SLOT_COUNTS))
        if (longest := next((length for length in list_lengths(context, limit) if has_room(needs, count, length)), 0))
    ]
    enough = [fit for fit in tried if fit.context >= min(limit, LONG_CONTEXT)]
    best = enough[:1] or sorted(tried, key=lambda fit: -fit.context)[:1]
    return best[0] if best else Fit(slots or SLOT_COUNTS[-1], context or min(limit, LEAST), fits=False)


def fit_page_pool(needs: Sequence[DeviceNeed], limit: int, slots: int = 0, context: int = 0, memory: int = 0) -> Fit:
    """Return the fit to serve with, if slots can share a pool of pages.

    memory: bytes of the pool; 0: all that is left. The pool holds at least one sequence of the longest length. If there
    is memory for the whole context of every slot, each slot gets rows of its own: attention over pages takes a fifth to
    a third longer.
    """
    tried = [
        find_longest_context(needs, limit, count, context, memory)
        for count in ((slots,) if slots else POOLED_SLOT_COUNTS)
    ]
    if not slots:
        tried = [fit for fit in tried if fit.slots <= POOLED_SLOTS or fills_slots(needs, fit)]
    enough = [fit for fit in tried if fit.context >= min(limit, LONG_CONTEXT)]
    best = enough[:1] or sorted(tried, key=lambda fit: -fit.context)[:1]
    if best and best[0].context:
        whole = Fit(best[0].slots, context or limit)
        return whole if not memory and has_room(needs, whole.slots, whole.context) else best[0]
    least = Fit(slots or SLOT_COUNTS[-1], context or min(limit, LEAST), fits=False)
    found = count_pages(needs, slots or POOLED_SLOTS, least.context, memory) if memory else 0
    # The pool that was requested limits how long sequences can be.
    if found:
        return Fit(slots or POOLED_SLOTS, min(least.context, found * PAGE), pages=found)
    return evolve(least, pages=-(-least.context // PAGE))


def with_spare_slots(fit: Fit, needs: Sequence[DeviceNeed]) -> Fit:
    """Return the fit with spare slots, where a slot that shares pages needs nothing for itself."""
    if not fit.pages or any(need.state or need.own for need in needs):
        return fit
    return evolve(fit, spare=-(-fit.slots // SPARE_PART))


def fills_slots(needs: Sequence[DeviceNeed], fit: Fit) -> bool:
    """Return whether a pool has enough pages for each of its slots, and its slots have little for themselves."""
    if not all(need.spares_memory(evolve(fit, pages=1)) for need in needs):
        return False
    least = min(LEAST_PAGES, -(-fit.context // PAGE))
    is_pool_large = all(need.compute_own(fit) <= need.compute_pool(fit) // LITTLE for need in needs)
    enough = fit.slots * least * PAGE if is_pool_large else fit.slots * min(fit.context, SHORT_SEQUENCE)
    return fit.rows >= enough


def find_longest_context(needs: Sequence[DeviceNeed], limit: int, slots: int, context: int, memory: int) -> Fit:
    """Return the longest context of which the pool holds one sequence. Its context is 0 if the pool holds none."""
    for length in list_lengths(context, limit):
        if (found := count_pages(needs, slots, length, memory)) * PAGE >= length:
            return Fit(slots, length, pages=found)
    return Fit(slots, 0)


def count_pages(needs: Sequence[DeviceNeed], slots: int, context: int, memory: int) -> int:
    """Return the pages of the pool, at most as many as all slots can use."""
    page_bytes = [PAGE * (need.row - need.own) for need in needs]
    left = [
        need.available - need.compute_taken(Fit(slots, context, pages=1)) + page
        for need, page in zip(needs, page_bytes, strict=True)
    ]
    # A host that has only weights has no rows.
    paged = [free_bytes // page for free_bytes, page in zip(left, page_bytes, strict=True) if page]
    most = memory // sum(page_bytes) if memory else min(paged)
    return max(0, min(most, slots * -(-context // PAGE)))


def has_room(needs: Sequence[DeviceNeed], slots: int, context: int) -> bool:
    """Return whether every device has memory for this many slots of this many tokens."""
    return all(need.compute_taken(Fit(slots, context)) <= need.available for need in needs)


def list_lengths(context: int, limit: int) -> Iterator[int]:
    """Yield the context that was asked for, or lengths to try, the longest first.

    The lengths are far apart, so that small differences in free memory between two starts seldom change the choice:
    rates and proofs are kept for each length.
    """
    if context or limit <= LEAST:
        yield context or limit
        return
    yield limit
    power = 1 << (limit - 1).bit_length()
    while power >= LEAST:
        yield from (step for step in (power + power // 2, power) if step < limit)
        power //= 2
