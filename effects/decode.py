"""A decode step: feed the last token, let a draft propose the next ones, and keep those that the target agrees with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import isqrt
from typing import ClassVar, TypeAlias

from attrs import Factory, field, frozen

from effects.ids import DeviceFailed, PageId, Side, SlotId, Tokens

# One token's natural-log probability and its alternatives, most likely first: (logprob, ((token, logprob), ...))
Logprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]

# Tokens: the shortest match of each class. A match is how many tokens agree with those at an earlier position.
MATCH_CLASSES = (3, 5, 9, 17, 33)


# A text that has had no match for long rarely has one after the next token, and each search costs all members of a step
# time. So it is searched after some steps only (`choose_search_gap`).
SEARCH_SHARE = 8  # a match of a single request is found late by an eighth of the tokens that had none
FIRST_SEARCH_SHARE = 4  # the first match of a text is found late by a quarter of them
LONGEST_SEARCH_GAP = 16  # steps between two searches of a single request, at most
# Requests in a row whose texts never had a match. After these, the next one will have none either, as a rule.
FRUITLESS_TEXTS = 16


def find_match_class(matched: int) -> int:
    """Return the class of a match of this many tokens; -1: it is too short to copy from."""
    return bisect_right(MATCH_CLASSES, matched) - 1


def choose_search_gap(unmatched: int, members: int, *, has_matched: bool = True, unmatched_texts: int = 0) -> int:
    """Return after how many steps a text is searched again that has had no match for `unmatched` tokens.

    All members wait for a search, and a match that is found late delays one of them. The gap that costs least then
    grows with the square root of the members. It is a power of 2, so that all texts are searched after the same steps.

    has_matched: an earlier search of the text has found something. A text that has never had a match is less likely to
    get one, so it is searched less often. unmatched_texts: requests in a row whose texts never had a match. After
    FRUITLESS_TEXTS of them, such a text is searched as seldom as any.
    """
    root = isqrt(members)
    most = LONGEST_SEARCH_GAP * root
    if has_matched:
        late = unmatched * root // SEARCH_SHARE
    elif unmatched_texts < FRUITLESS_TEXTS:
        late = max(root, unmatched * root // FIRST_SEARCH_SHARE)
    else:
        late = most
    return 1 << max(min(late, most), 1).bit_length() - 1


def share_rows(wanted: Sequence[int], rows: int) -> list[int]:
    """Divide the rows of a step among the members that copy. wanted: the tokens that each of them would copy.

    The shares are equal, except that no member gets more than it wants. Rows that are left over go to the first
    members. So 7 rows for 9, 2 and 9 wanted tokens are shared as 3, 2 and 2.

    Every member pays for the step. If the first ones got all rows, the others would only lose time. And the first
    tokens after a match are right more often than those far behind it.
    """
    if sum(wanted) <= rows:
        return list(wanted)
    shares = [0] * len(wanted)
    ascending = sorted(range(len(wanted)), key=lambda index: (wanted[index], -index))
    for place, index in enumerate(ascending):
        shares[index] = min(wanted[index], max(0, rows) // (len(wanted) - place))
        rows -= shares[index]
    return shares


def infer_accepted(done: Decoded) -> int:
    """Return the number of accepted proposals: all tokens except the last one, which the target added itself.

    It is the default of `Decoded.accepted`. An executor whose last token is a proposal too sets that field itself.
    """
    return len(done.tokens) - 1 if done.proposed else 0


@frozen
class Decoded:
    """The target picked `tokens`: the accepted proposals, then one of its own.

    A stop token is always the last one, whether it was proposed or not: nothing is kept past it. An executor that
    runs unattended may report several plain steps at once.
    """

    tokens: Tokens  # at least one
    proposed: int = 0
    logprobs: tuple[Logprob, ...] = ()  # one for each token, if the job asks for them
    ns: int = 0  # nanoseconds of a step of the launch on the lane, with its draft; 0: not measured
    accepted: int = field(default=Factory(infer_accepted, takes_self=True))  # how many of `tokens` were proposed
    steps: int = 1  # that are reported
    more: bool = False  # the launch goes on: this is not its last outcome for the request
    # Tokens before the next one that agree with an earlier position of a text, so that what followed there may be
    # copied. 0: there are fewer than three, or no text was searched after this step.
    matched: int = 0
    copied: int = 0  # proposals of the chain that was copied; other proposals are its branch. 0: a draft was asked
    rows: int = 0  # of the step's forward, of all members, where any of them copied; 0: none did
    branched: bool = False  # a member's copies had a branch, so the forward verified a tree
    # Of `tokens`, those on the branch of what was copied. Where no branch was proposed: 1 if the target went on instead
    # as the branch would have begun.
    on_branch: int = 0


@frozen
class Copying:
    """The rule by which a request of a launch copies earlier text.

    The core makes the rule in advance, because the executor finds matches between two steps and does not ask the core
    there. A step before which the request's text has a match proposes as many copied tokens as `counts` says for the
    class of that match. They replace the proposals of a draft. That chain may have one branch.
    """

    counts: tuple[int, ...]  # tokens, for each of MATCH_CLASSES; 0: nothing is copied
    rows: int  # that a step with copies feeds at most, of all members
    # Steps with proposals that the launch may take without asking, however many of them are right. Plain steps between
    # them do not count.
    steps: int
    # Tokens of a branch of the chain of `counts`, for each of MATCH_CLASSES: what followed at another position.
    branches: tuple[int, ...] = (0,) * len(MATCH_CLASSES)


def make_copying(width: int, branch: int, steps: int) -> Copying:
    """Return the rule of one request that copies `width` tokens after every match, `branch` of them on a branch."""
    every = len(MATCH_CLASSES)
    return Copying((width - branch,) * every, 1 + width, steps, (branch,) * every)


@frozen
class RunDecode:
    """Feed `token` at row `position`, and up to `propose` drafted tokens after it.

    Proposals are a chain. Where an executor proposes trees, further nodes that a chain could not hold branch off.

    The executor may go on unattended after this step: it feeds the token that it picked, with as many proposals, and
    reports on the way. A stop token, a failure, or an `Abandon` of one member ends that for the whole launch where
    there is a draft. `StopLaunch` ends it for all members. With `copying`, the rules hold for the members that the
    launch begins with. Once one of them has ended or another request has joined, nothing is copied any more, and a
    match to copy from ends the launch for all members.

    Three limits are called `steps`. `RunDecode.steps` is that of one member. It counts steps as a rule, but tokens if
    there is a rule for copies, since it is not known in advance how many tokens a step gives. `Copying.steps` counts
    steps with proposals only. `Plan.steps` (`states/speculation_plan.py`) is the core's own, of which both are made.
    """

    outcomes: ClassVar = (Decoded, DeviceFailed)
    side: ClassVar = Side.DEVICE
    slot: SlotId
    position: int  # rows [0, position) are valid
    token: int  # it comes along so that an executor can refuse to run on a slot that is out of step
    propose: int = 0
    # Copy the positional state out first, to be kept: the one at the end of the last block up to `position`. A failure
    # to keep it does not fail the step.
    checkpoint: bool = False
    steps: int = 1  # that the executor may take at most without asking; with `copying`: tokens that it may give
    pages: tuple[PageId, ...] = ()  # that the slot has from now on, behind those that it had
    copying: Copying | None = None  # None: nothing is copied
