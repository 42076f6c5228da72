"""Rates: how long things take on this machine, in nanoseconds, as far as decisions depend on it.

Rates are learned from acknowledgements only, so a trace has all that they were learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple, TypeAlias

from attrs import evolve, field, frozen

from effects.ids import Tier
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.restore import BlocksRestored

ALONE = 1000  # a slowdown in thousandths: something takes as long as it takes alone
SLOWEST = 64 * ALONE  # no measurement of a slowdown counts for more
FADE_DIVISOR = 32  # what is not measured again loses a 32nd each time
INITIAL_ACCOUNT = 5000  # the most that `Rates.account` is refilled to, and its first value: 1 % of 512 tokens
FIRST_SPAN = 1024  # tokens of the first span of positions; every next span ends at twice its start


class TimedStep(NamedTuple):
    """The time of one shape of decode step. A tuple, so that entries sort by their shape and a trace has them as lists.

    The first three fields are the shape (`step_prices.Shape`). `plain_then_ns` says how long a plain step of the same
    requests took when this one was timed last.
    """

    span: int  # of positions, as in `Rates.prefill`
    members: int  # requests
    rows: int  # of the forward; 0: a plain step, in which no request proposes anything
    ns: int
    plain_then_ns: int  # 0 for a plain step


DecodeTimes: TypeAlias = tuple[TimedStep, ...]  # ascending; one entry for each shape that was timed


@frozen
class ClassGains:
    """The gains of copies after matches of one class."""

    seen: int  # decode steps in which something was copied after such a match
    gains: tuple[int, ...]  # copied tokens that are expected to be right, in thousandths, one for each width
    branch_gain: int = 0  # tokens of a branch that are expected to be right instead, in thousandths

    def __attrs_post_init__(self) -> None:
        """Refuse impossible values, as `Rates` does."""
        if min(self.seen, self.branch_gain, *self.gains, 0) < 0:
            raise ValueError(f"impossible gains: {self}")


@frozen
class Rates:
    """Times and counts that were measured. 0, or an empty tuple or mapping, where nothing was.

    A span is a range of positions in a prompt: [0, 1024), [1024, 2048), [2048, 4096), and so on, doubling.
    """

    prefill: tuple[int, ...] = ()  # by span, to compute one prompt token
    # To load one token's rows, by the name of the tier that they come from.
    loads: Mapping[Tier, int] = field(factory=dict[Tier, int], hash=False)
    decode: DecodeTimes = ()
    # The times above are of either side alone. These are what computing and loading take while both go on for one
    # prompt, in thousandths of that. A mixture of the two conditions in one number would predict neither.
    prefill_slowdown: int = 0
    load_slowdown: int = 0
    scoring: int = 0  # to score one token of a prompt
    # What `states/speculation_control.py` has learned of all requests together.
    gains: tuple[int, ...] = ()  # proposals of each width that are right, in thousandths
    seen: int = 0  # decode steps with proposals
    account: int = INITIAL_ACCOUNT  # thousandths of a plain step that may still be lost
    steps_until_trial: int = 0  # until proposals are tried again although they are not expected to pay
    next_trial_gap: int = 1  # plain steps from the next trial to the one after it
    # What `states/suffix_control.py` has learned of all requests together. Times are those of steps with copies, in the
    # format of `decode`; their plain steps are in `decode`.
    copy_times: DecodeTimes = ()
    copied: tuple[ClassGains, ...] = ()  # one for each class of matches
    copy_steps_until_trial: int = 0  # until copies are tried again although they are not expected to pay
    copy_next_trial_gap: int = 1  # decode steps from the next trial of copies to the one after it
    branch_times: DecodeTimes = ()  # as `copy_times`, of steps in which a member's copies have a branch

    def __attrs_post_init__(self) -> None:
        """Refuse impossible values. Rates also come out of traces, which are hostile input.

        Times of steps are checked where traces are read. There may be hundreds, and each step makes rates anew.
        """
        slowdowns = (self.prefill_slowdown, self.load_slowdown)
        single = (self.scoring, *slowdowns, self.seen, self.steps_until_trial, self.next_trial_gap)
        copying = (self.copy_steps_until_trial, self.copy_next_trial_gap)
        if min(chain(single, copying, self.loads.values(), self.prefill, self.gains)) < 0 or len(self.prefill) > 64:
            raise ValueError(f"impossible rates: {self}")

    def with_decode_times(self, decode: DecodeTimes) -> Rates:
        """Return these rates with other times of decode steps."""
        return self.with_steps(decode, self.account, self.steps_until_trial, self.copy_steps_until_trial)

    def with_steps(
        self, decode: DecodeTimes, account: int, steps_until_trial: int, copy_steps_until_trial: int
    ) -> Rates:
        """Return these rates after plain decode steps: with other times, another account, and other steps until trials.

        This runs once for every step of every launch. `evolve` would take three times as long.
        """
        return Rates(
            self.prefill,
            self.loads,
            decode,
            self.prefill_slowdown,
            self.load_slowdown,
            self.scoring,
            self.gains,
            self.seen,
            account,
            steps_until_trial,
            self.next_trial_gap,
            self.copy_times,
            self.copied,
            copy_steps_until_trial,
            self.copy_next_trial_gap,
            self.branch_times,
        )


# --- what the rates predict ---


def find_span(position: int) -> int:
    """Return the index in `Rates.prefill` of the span that a token's position is in."""
    return (position // FIRST_SPAN).bit_length()


def fill_gaps(prefill: tuple[int, ...]) -> tuple[int, ...]:
    """Return a time for every span. One that was not measured takes its neighbour's, or a later one's if it is first.

    Spans that follow are at least as slow as those before them.
    """
    times = list[int]()
    slowest = 0
    first = next((time for time in prefill if time), 0)
    for time in prefill:
        times.append(time or max(slowest, first))
        slowest = max(slowest, times[-1])
    return tuple(times)


def estimate_prefill_time(rates: Rates, start: int, stop: int) -> int:
    """Return the time to compute rows `[start, stop)`. 0: it is not known, or there are none."""
    times = fill_gaps(rates.prefill)
    if not any(times):
        return 0
    total = 0
    beyond_last = max(times)
    while start < stop:
        span = find_span(start)
        end = min(stop, FIRST_SPAN << span)
        total += (end - start) * (times[span] if span < len(times) else beyond_last)
        start = end
    return total


def get_load_time(rates: Rates, tier: Tier) -> int:
    """Return the time to load one token's rows from a tier; 0: it is not known."""
    return rates.loads.get(tier, 0)


# --- what outcomes teach ---


def learn_prefill(rates: Rates, asked: RunPrefill, done: PrefillAdvanced, chunk: int, *, concurrent: bool) -> Rates:
    """Return the rates after a prefill. Only whole chunks that were timed are learned from.

    concurrent: rows of the same prompt were loaded meanwhile.
    """
    rows = done.stop - asked.start
    if not done.ns or not rows or rows % chunk:
        return rates
    return record_prefill(rates, asked.start, rows, done.ns, concurrent=concurrent)


def learn_load(
    rates: Rates, tier: Tier, done: BlocksRestored, chunk: int, state_tokens: int, *, concurrent: bool
) -> Rates:
    """Return the rates after a load. A load shorter than a chunk is mostly waiting, which predicts no longer one.

    state_tokens: what positional state that came along takes, in tokens whose rows take as long.
    concurrent: rows of the same prompt were computed meanwhile.
    """
    tokens = done.stop - done.start + state_tokens
    return record_load(rates, tier, tokens, done.ns, concurrent=concurrent) if done.ns and tokens >= chunk else rates


def record_prefill(rates: Rates, start: int, rows: int, took_ns: int, *, concurrent: bool) -> Rates:
    """Return the rates after whole chunks were computed.

    If they lie in several spans, each span is taken to have its share of the time as it was expected.
    """
    alone = estimate_prefill_time(rates, start, start + rows)
    if concurrent:
        return evolve(rates, prefill_slowdown=update_slowdown(rates.prefill_slowdown, took_ns, alone))
    spans = range(find_span(start), find_span(start + rows - 1) + 1)
    times = [*rates.prefill, *(0,) * (spans.stop - len(rates.prefill))]
    expected = fill_gaps(tuple(times)) if alone else (1,) * spans.stop
    for span in spans:
        times[span] = blend(times[span], max(1, expected[span] * took_ns // (alone or rows)))
    return evolve(rates, prefill=tuple(times))


def record_load(rates: Rates, tier: Tier, tokens: int, took_ns: int, *, concurrent: bool) -> Rates:
    """Return the rates after rows were loaded. concurrent: rows of the same prompt were computed meanwhile.

    A concurrent load that was quicker than a load alone teaches the time alone as well: files may be in the page cache
    now.
    """
    alone = tokens * get_load_time(rates, tier)
    if concurrent:
        rates = evolve(rates, load_slowdown=update_slowdown(rates.load_slowdown, took_ns, alone))
    if concurrent and took_ns >= alone:
        return rates
    return with_load_time(rates, tier, blend(get_load_time(rates, tier), max(1, took_ns // tokens)))


def with_load_time(rates: Rates, tier: Tier, time: int) -> Rates:
    """Return the rates with this time to load one token's rows from a tier."""
    known = get_load_time(rates, tier)
    return rates if time == known else evolve(rates, loads={**rates.loads, tier: time})


def record_scoring(rates: Rates, tokens: int, took_ns: int) -> Rates:
    """Return the rates after a whole prompt of this many tokens was scored."""
    return evolve(rates, scoring=blend(rates.scoring, max(1, took_ns // tokens)))


def fade_untried(rates: Rates, tier: Tier, *, loaded: bool) -> Rates:
    """Return the rates after a prefix was loaded with nothing computed meanwhile, or was not loaded at all.

    The times that speak against the other way are not measured again then, so they fade. Otherwise one slow read, or
    one busy minute, would decide for ever.
    """
    prefill_slowdown = fade(rates.prefill_slowdown, ALONE)
    load_slowdown = fade(rates.load_slowdown, ALONE)
    rates = evolve(rates, prefill_slowdown=prefill_slowdown, load_slowdown=load_slowdown)
    return rates if loaded else with_load_time(rates, tier, fade(get_load_time(rates, tier), 1))


def fade(value: int, least: int) -> int:
    """Return the value less a 32nd, but not below `least`. 0 stays 0: it is not known."""
    return value and max(least, value - value // FADE_DIVISOR)


def update_slowdown(slowdown: int, took_ns: int, alone_ns: int) -> int:
    """Return a slowdown after one more measurement."""
    return blend(slowdown or ALONE, compute_slowdown(took_ns, alone_ns)) if alone_ns else slowdown


def compute_slowdown(took_ns: int, alone_ns: int) -> int:
    """Return how much longer something took than alone, in thousandths; 0: the time alone is not known."""
    return min(max(ALONE, took_ns * ALONE // alone_ns), SLOWEST) if alone_ns else 0


def blend(mean: int, value: int) -> int:
    """Return a moving average after one more value. It starts at its first value."""
    return (3 * mean + value) // 4 if mean else value
