"""How long things take here, in nanoseconds, as far as decisions depend on it. Folded from acknowledgements only."""

from __future__ import annotations

from itertools import chain

from attrs import evolve, frozen

from effects.ids import Tier
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored

ALONE = 1000  # thousandths: as long as alone
SLOWEST = 64 * ALONE  # no measurement counts for more
FADING = 32  # what is not measured again loses one part in so many each time
SPARE = 5000  # of `Rates.spare` at most, which it begins with: 1 % of 512 tokens
FIRST = 1024  # tokens of the first span of positions; every next one ends at twice its start


@frozen
class Rates:
    """0, or nothing, where nothing has been measured.

    prefill: to compute one prompt token, by where it stands: [0, 1024), [1024, 2048), [2048, 4096), doubling.
    host, disk: to load one token's rows. drafter: to score one token of a prompt. decode: (span of positions as in
    prefill, requests, rows that are fed, a whole launch of such decode steps, what one in which nobody proposes took
    then), ascending; 0 rows: one in which nobody proposes, and nothing beside it.

    These are times of either side alone. prefill_beside, load_beside: in thousandths of them, what computing and
    loading take while both go on for one prompt. A mixture of the two conditions in one number would predict neither.

    Of speculation (`speculation_control.py`), gains: proposals of each width that are right, in thousandths; seen:
    decode steps with any. spare: thousandths of a plain launch that may yet be lost. rest: plain launches until
    the next try; pause: of the rest after it.
    """

    prefill: tuple[int, ...] = ()
    host: int = 0
    disk: int = 0
    decode: tuple[tuple[int, int, int, int, int], ...] = ()
    prefill_beside: int = 0
    load_beside: int = 0
    drafter: int = 0
    gains: tuple[int, ...] = ()
    seen: int = 0
    spare: int = SPARE
    rest: int = 0
    pause: int = 1

    def __attrs_post_init__(self) -> None:
        """Rates also come out of traces, which are hostile input."""
        besides = (self.prefill_beside, self.load_beside)
        single = (self.host, self.disk, self.drafter, *besides, self.seen, self.rest, self.pause)
        if min(chain(single, self.prefill, self.gains, *self.decode)) < 0 or len(self.prefill) > 64:
            raise ValueError(f"rates that cannot be: {self}")


def span_of(position: int) -> int:
    """Which entry of `Rates.prefill` a token's position belongs to."""
    return (position // FIRST).bit_length()


def filled(prefill: tuple[int, ...]) -> tuple[int, ...]:
    """No gaps: what was never measured takes its neighbour's value, and later ones are at least as slow."""
    times, slowest = list[int](), 0
    first = next((time for time in prefill if time), 0)
    for time in prefill:
        times.append(time or max(slowest, first))
        slowest = max(slowest, times[-1])
    return tuple(times)


def prefill_time(rates: Rates, start: int, stop: int) -> int:
    """To compute rows `[start, stop)`. 0: unknown, for at least one token."""
    times = filled(rates.prefill)
    if not any(times):
        return 0
    total, after = 0, max(times)
    while start < stop:
        span = span_of(start)
        end = min(stop, FIRST << span)
        total += (end - start) * (times[span] if span < len(times) else after)
        start = end
    return total


def load_time(rates: Rates, tier: Tier) -> int:
    """To load one token's rows; 0: unknown."""
    return {"host": rates.host, "disk": rates.disk}.get(tier, 0)


def computed(rates: Rates, asked: RunPrefill, done: PrefillAdvanced, chunk: int, *, beside: bool) -> Rates:
    """What an acknowledgement says of the next one: only of whole chunks, and where it was timed."""
    rows = done.stop - asked.start
    if not done.ns or not rows or rows % chunk:
        return rates
    return prefilled(rates, asked.start, rows, done.ns, beside=beside)


def loaded(rates: Rates, tier: Tier, done: BlocksRestored, chunk: int, state: int, *, beside: bool) -> Rates:
    """The same. Of a load shorter than a chunk most of the time is waiting, which says nothing about a longer one.

    state: positional state that came with it, in tokens whose rows take as long.
    """
    tokens = done.stop - done.start + state
    return restored(rates, tier, tokens, done.ns, beside=beside) if done.ns and tokens >= chunk else rates


def prefilled(rates: Rates, start: int, rows: int, took_ns: int, *, beside: bool) -> Rates:
    """Whole chunks were computed; beside: while rows were loaded for the same prompt. Of chunks in several spans each
    has taken its share of the time as it was expected to.
    """
    alone = prefill_time(rates, start, start + rows)
    if beside:
        return evolve(rates, prefill_beside=slowed(rates.prefill_beside, took_ns, alone))
    spans = range(span_of(start), span_of(start + rows - 1) + 1)
    times = [*rates.prefill, *(0,) * (spans.stop - len(rates.prefill))]
    expected = filled(tuple(times)) if alone else (1,) * spans.stop
    for span in spans:
        times[span] = blended(times[span], max(1, expected[span] * took_ns // (alone or rows)))
    return evolve(rates, prefill=tuple(times))


def restored(rates: Rates, tier: Tier, tokens: int, took_ns: int, *, beside: bool) -> Rates:
    """Rows were loaded; beside: while others of the same prompt were computed.

    What took less even so takes no longer alone: files may be in the page cache this time.
    """
    alone = tokens * load_time(rates, tier)
    if beside:
        rates = evolve(rates, load_beside=slowed(rates.load_beside, took_ns, alone))
    if beside and took_ns >= alone:
        return rates
    return with_load(rates, tier, blended(load_time(rates, tier), max(1, took_ns // tokens)))


def with_load(rates: Rates, tier: Tier, time: int) -> Rates:
    return evolve(rates, host=time) if tier == "host" else evolve(rates, disk=time)


def scored(rates: Rates, tokens: int, took_ns: int) -> Rates:
    """A whole prompt was."""
    return evolve(rates, drafter=blended(rates.drafter, max(1, took_ns // tokens)))


def untried(rates: Rates, tier: Tier, *, loaded: bool) -> Rates:
    """What was kept is loaded alone, or not at all, and so what speaks against it is not measured again: it fades.

    Otherwise one slow read, or one busy minute, would decide for ever.
    """
    prefill, load = faded(rates.prefill_beside, ALONE), faded(rates.load_beside, ALONE)
    rates = evolve(rates, prefill_beside=prefill, load_beside=load)
    return rates if loaded else with_load(rates, tier, faded(load_time(rates, tier), 1))


def faded(value: int, least: int) -> int:
    return value and max(least, value - value // FADING)


def slowed(known: int, took_ns: int, alone_ns: int) -> int:
    """A factor after one more measurement."""
    return blended(known or ALONE, factor(took_ns, alone_ns)) if alone_ns else known


def factor(took_ns: int, alone_ns: int) -> int:
    """How much longer it takes beside something else than alone; 0: not known."""
    return min(max(ALONE, took_ns * ALONE // alone_ns), SLOWEST) if alone_ns else 0


def blended(mean: int, value: int) -> int:
    """A moving average that starts at its first value."""
    return (3 * mean + value) // 4 if mean else value
