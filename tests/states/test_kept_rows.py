"""Rows that a slot keeps: those compared as bytes are those compared as tuples."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from effects.ids import SlotId, Tokens
from effects.job import Job
from effects.packed_tokens import pack_tokens, unpack_tokens
from states.kept_rows import get_kept_rows, get_kept_sequence, make_prompt
from states.request_states import RequestRemainder, SlotLease
from states.sequences import count_continuable_rows
from tests.states.builders import STORE

TOKENS = st.lists(st.sampled_from((1, 2, 2**40 - 1)), max_size=24).map(tuple)


@given(
    head=TOKENS,
    own=TOKENS.filter(bool),
    answer=TOKENS,
    after=TOKENS,
    valid=st.integers(0, 48),
    ahead=st.integers(0, 3),
    is_decoded_kept=st.booleans(),
)
def test_rows_compared_as_bytes_are_those_compared_as_tuples(
    *, head: Tokens, own: Tokens, answer: Tokens, after: Tokens, valid: int, ahead: int, is_decoded_kept: bool
) -> None:
    """The other prompt goes on from head, own and answer, as far as `after` does not differ."""
    settings = evolve(STORE, block_size=4, chunk=8, keep_decoded=is_decoded_kept)
    prompt = make_prompt(Job(head + own, max_tokens=8))
    valid = min(valid, len(prompt.tokens) + len(answer))
    ahead = min(ahead, max(0, len(prompt.tokens) - valid))
    left = RequestRemainder(SlotLease(SlotId(0), valid, 0, "none", ahead), prompt, answer)
    for other in (head + own + answer + after, head + after, after, head + own + after):
        if not other:
            continue
        expected = count_continuable_rows(settings, get_kept_sequence(settings, left), other)
        found = get_kept_rows(settings, left).count_continuable(settings, make_prompt(Job(other, max_tokens=8)))
        assert found == expected


@given(TOKENS)
def test_packed_tokens_are_unpacked_as_they_were(tokens: Tokens) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens
