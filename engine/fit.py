"""How many sequences of which length there is room for, by what the ledger will charge: before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

SLOTS = (4, 2, 1)  # where nobody says: as many as leave each long enough
ENOUGH = 32768  # tokens: an agent's session; to have more of them is worth more than longer ones
LEAST = 1024


@frozen
class DeviceNeed:
    """Bytes that a device has to give, and what is asked of it.

    fixed: weights, buffers, states that are kept beside the slots. row: of a token in each slot. state: of each slot.
    once: of a token of the longest sequence, for all slots together.
    """

    name: str
    there: int
    fixed: int
    row: int
    state: int = 0
    once: int = 0

    def taken(self, slots: int, context: int) -> int:
        return self.fixed + self.once * context + slots * (self.row * context + self.state)


@frozen
class Fit:
    """slots sequences of context tokens. fits: the devices have room for them, as far as can be known before."""

    slots: int
    context: int
    fits: bool = True


def fitted(needs: Sequence[DeviceNeed], limit: int, slots: int = 0, context: int = 0) -> Fit:
    """What to serve with. limit: tokens that the model was made for. slots, context: what was asked for; 0: what fits.

    Where nobody says, four slots, or two, or one, until each is as long as the model can, or long enough.
    """
    tried = [
        Fit(count, longest)
        for count in ((slots,) if slots else SLOTS)
        if (longest := next((each for each in lengths(context, limit) if room(needs, count, each)), 0))
    ]
    enough = [one for one in tried if one.context >= min(limit, ENOUGH)]
    best = enough[:1] or sorted(tried, key=lambda one: -one.context)[:1]
    return best[0] if best else Fit(slots or SLOTS[-1], context or min(limit, LEAST), fits=False)


def room(needs: Sequence[DeviceNeed], slots: int, context: int) -> bool:
    return all(need.taken(slots, context) <= need.there for need in needs)


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
