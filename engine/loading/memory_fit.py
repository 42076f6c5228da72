"""How many sequences of which length there is room for, by what the ledger will charge: before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from effects.ids import PAGE

SLOTS = (4, 2, 1)  # where nobody says: as many as leave each long enough
MORE = (16, 8)  # where these take little of what is there, though each is as long as the model can
LITTLE = 4  # part of it: a quarter, since what slots keep stays in memory that others may want
POOLED = (16, 8, 4, 2, 1)  # the same, where slots share pages: they cost what their sequences take, and no more
ENOUGH = 32768  # tokens: an agent's session; to have more of them is worth more than longer ones
LEAST = 1024


@frozen
class DeviceNeed:
    """Bytes that a device has to give, and what is asked of it.

    fixed: weights, buffers, states that are kept beside the slots. row: of a token in each slot; own: what of it is
    there for every slot, whatever pages they share. state: of each slot. once: of a token of the longest sequence, for
    all slots together.
    """

    name: str
    there: int
    fixed: int
    row: int
    state: int = 0
    once: int = 0
    own: int = 0

    def taken(self, fit: Fit) -> int:
        own = fit.slots * fit.context * (self.own if fit.pages else self.row)
        pages = fit.pages * PAGE * (self.row - self.own)
        return self.fixed + self.once * fit.context + fit.slots * self.state + own + pages

    def spares(self, fit: Fit) -> bool:
        """Is most of what is there left, beside what is fixed?"""
        return self.taken(fit) - self.fixed <= (self.there - self.fixed) // LITTLE


@frozen
class Fit:
    """slots sequences of context tokens. fits: the devices have room for them, as far as can be known before.

    pages: of PAGE rows, that the slots share; 0: each has room for the whole context.
    """

    slots: int
    context: int
    fits: bool = True
    pages: int = 0

    @property
    def rows(self) -> int:
        """Of all slots together."""
        return self.pages * PAGE or self.slots * self.context


def fitted(needs: Sequence[DeviceNeed], limit: int, slots: int = 0, context: int = 0) -> Fit:
    """What to serve with. limit: tokens that the model was made for. slots, context: what was asked for; 0: what fits.

    Where nobody says, more than four slots if they take little; else four, or two, or one, until each is as long as the
    model can, or long enough.
    """
    more = [count for count in MORE if all(need.spares(Fit(count, context or limit)) for need in needs)]
    tried = [
        Fit(count, longest)
        for count in ((slots,) if slots else (*more, *SLOTS))
        if (longest := next((each for each in lengths(context, limit) if room(needs, count, each)), 0))
    ]
    enough = [one for one in tried if one.context >= min(limit, ENOUGH)]
    best = enough[:1] or sorted(tried, key=lambda one: -one.context)[:1]
    return best[0] if best else Fit(slots or SLOTS[-1], context or min(limit, LEAST), fits=False)


def pooled(needs: Sequence[DeviceNeed], limit: int, slots: int = 0, context: int = 0, memory: int = 0) -> Fit:
    """The same where slots can share a pool of pages: all that is left, or as many bytes as were asked for. It holds
    the longest sequence once at least. Where there is room for all of every slot, each has its own: attention over
    pages takes a fifth to a third longer.
    """
    whole = Fit(slots or POOLED[0], context or limit)
    if not memory and room(needs, whole.slots, whole.context):
        return whole
    tried = [longest_of(needs, limit, count, context, memory) for count in ((slots,) if slots else POOLED)]
    enough = [one for one in tried if one.context >= min(limit, ENOUGH)]
    best = enough[:1] or sorted(tried, key=lambda one: -one.context)[:1]
    if best and best[0].context:
        return best[0]
    least = Fit(slots or SLOTS[-1], context or min(limit, LEAST), fits=False)
    found = pages(needs, slots or POOLED[0], least.context, memory) if memory else 0
    if found:  # what was asked for decides how long sequences are
        return Fit(slots or POOLED[0], min(least.context, found * PAGE), pages=found)
    return evolve(least, pages=-(-least.context // PAGE))


def longest_of(needs: Sequence[DeviceNeed], limit: int, slots: int, context: int, memory: int) -> Fit:
    """The longest sequences that the pool holds one of; of none, where it holds nothing."""
    for each in lengths(context, limit):
        if (found := pages(needs, slots, each, memory)) * PAGE >= each:
            return Fit(slots, each, pages=found)
    return Fit(slots, 0)


def pages(needs: Sequence[DeviceNeed], slots: int, context: int, memory: int) -> int:
    """Of the pool: no more than all slots could use."""
    each = [PAGE * (need.row - need.own) for need in needs]
    left = [
        need.there - need.taken(Fit(slots, context, pages=1)) + page for need, page in zip(needs, each, strict=True)
    ]
    paged = [one // page for one, page in zip(left, each, strict=True) if page]  # a host with weights alone has no rows
    most = memory // sum(each) if memory else min(paged)
    return max(0, min(most, slots * -(-context // PAGE)))


def room(needs: Sequence[DeviceNeed], slots: int, context: int) -> bool:
    return all(need.taken(Fit(slots, context)) <= need.there for need in needs)


def lengths(context: int, limit: int) -> Iterator[int]:
    """The one that was asked for, or those to try, longest first: far enough apart that what others leave of a device's
    memory from one start to the next seldom changes which it is, since times and proofs are kept for each."""
    if context or limit <= LEAST:
        yield context or limit
        return
    yield limit
    power = 1 << (limit - 1).bit_length()
    while power >= LEAST:
        yield from (step for step in (power + power // 2, power) if step < limit)
        power //= 2
