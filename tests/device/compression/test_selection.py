"""Tests of what is kept of a scored prompt: promises that hold for any scores, and small prompts that were checked by
hand.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.device.compression.select_tokens import (
    ANCHORS,
    GRAM,
    HEAD,
    LEAST,
    MOST,
    PIECE,
    TAIL,
    SelectedTokens,
    TokenMarks,
    cut_into_pieces,
    forced_spans,
    merge_spans,
    select,
)
from effects.compression import PromptPart
from effects.ids import Tokens
from tests.examples import count_examples

LINE, SENTENCE, CONTROL = 1, 2, 0
MARKS = TokenMarks(bytes((0, 1)), bytes((0, 0, 1)), frozenset((CONTROL,)))
WORDS = st.sampled_from((CONTROL, LINE, SENTENCE, *range(3, 40)))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Tokens, list[float], list[PromptPart]]:
    prompt = tuple(draw(st.lists(WORDS, min_size=8, max_size=600)))
    scores = draw(st.lists(st.sampled_from((0.0, 0.25, 0.5, 1.0)), min_size=len(prompt), max_size=len(prompt)))
    edges = sorted(draw(st.sets(st.integers(0, len(prompt)), max_size=6)))
    parts = [PromptPart("user", *span, draw(st.booleans())) for span in pairwise(edges)]
    return prompt, scores, parts


def tokens_of(spans: tuple[tuple[int, int], ...]) -> set[int]:
    return {token for start, stop in spans for token in range(start, stop)}


def chosen(prompt: Tokens, keep: int, **how: object) -> SelectedTokens:
    found = select(prompt, how.pop("scores", [0.0] * len(prompt)), how.pop("parts", ()), MARKS, keep=keep, most=10**6)
    assert found is not None
    return found


@settings(max_examples=count_examples(150), deadline=None)
@given(prompts(), st.integers(1, 600), st.integers(1, 600))
def test_whatever_the_scores_the_promises_hold(
    case: tuple[Tokens, list[float], list[PromptPart]], keep: int, most: int
) -> None:
    prompt, scores, parts = case
    held = tokens_of(merge_spans([*forced_spans(prompt, parts, MARKS), (len(prompt) - 1, len(prompt))]))
    found = select(prompt, scores, parts, MARKS, keep=keep, most=most)
    if found is None:
        assert len(held) > most
        return
    edges = [at for span in found.spans for at in span]
    assert edges == sorted(set(edges)), "ordered, disjoint, none touching the next"
    assert edges[0] >= 0
    assert edges[-1] == len(prompt)
    kept, forced = tokens_of(found.spans), tokens_of(found.forced)
    assert held <= forced <= kept
    assert len(kept) <= max(min(keep, most), len(held)), "the ratio is kept, but for what may not be dropped"
    assert found.tokens == len(kept)
    assert select(prompt, scores, parts, MARKS, keep=keep, most=most) == found


@settings(max_examples=count_examples(60), deadline=None)
@given(prompts())
def test_pieces_end_with_lines_and_messages(
    case: tuple[Tokens, list[float], list[PromptPart]],
) -> None:
    prompt, _, parts = case
    cuts = list(cut_into_pieces(prompt, parts, MARKS))
    assert [at for cut in cuts for at in range(*cut)] == list(range(len(prompt)))
    assert all(stop - start <= MOST for start, stop in cuts)
    stops = {stop for _, stop in cuts}
    assert {part.start for part in parts} - {0, len(prompt)} <= stops
    for start, stop in cuts:
        lines = [at for at in range(start + LEAST, start + MOST + 1) if prompt[at - 1 : at] == (LINE,)]
        ended = stop in {len(prompt), *(part.start for part in parts)}
        assert ended or prompt[stop - 1] == LINE or not lines


def test_a_line_comes_before_a_sentence_and_the_closest_to_a_piece_before_others() -> None:
    prompt = [9] * 200
    prompt[19], prompt[30], prompt[35] = LINE, SENTENCE, LINE
    assert next(cut_into_pieces(tuple(prompt), (), MARKS)) == (0, 36)
    prompt[19] = prompt[35] = 9
    assert next(cut_into_pieces(tuple(prompt), (), MARKS)) == (0, 31)
    prompt[30] = 9
    assert next(cut_into_pieces(tuple(prompt), (), MARKS)) == (0, PIECE)


def test_the_best_pieces_are_kept_and_of_equal_ones_the_first() -> None:
    prompt = tuple(range(3, 3 + 6400))
    scores = [0.0] * 6400
    scores[3200:3232] = [1.0] * 32
    found = chosen(prompt, 3 * (HEAD + TAIL), scores=scores)
    assert found.spans == ((0, 3 * HEAD + 2 * TAIL - PIECE), (3200, 3232), (6400 - TAIL, 6400))
    assert found.forced == ((0, HEAD), (6400 - TAIL, 6400))


def test_head_and_tail_share_a_small_budget_one_to_three() -> None:
    found = chosen(tuple(range(3, 3 + 6400)), 24 * PIECE)
    assert found.forced == ((0, 2 * PIECE), (6400 - 6 * PIECE, 6400))
    assert found.tokens == 24 * PIECE


def test_what_opens_a_message_and_control_tokens_are_kept_to_the_token() -> None:
    prompt = (CONTROL, 7, LINE, *range(50, 750), CONTROL, LINE, CONTROL, 8, LINE, *range(750, 1450))
    parts = (PromptPart("system", 1, 705), PromptPart("user", 706, len(prompt)))
    held = merge_spans(list(forced_spans(prompt, parts, MARKS)))
    assert held == ((0, 3), (703, 704), (705, 708))
    assert tokens_of(held) <= tokens_of(chosen(prompt, 1, parts=parts).spans)


def test_a_protected_message_is_kept_whole_or_nothing_is_dropped() -> None:
    prompt, part = tuple(range(3, 1003)), PromptPart("user", 400, 500, protected=True)
    assert (400, 500) in chosen(prompt, 10, parts=(part,)).spans
    assert select(prompt, [0.0] * 1000, (part,), MARKS, keep=10, most=100) is None


def repeating(offsets: list[int], count: int = 3200) -> Tokens:
    """The end says again what stands at these places."""
    prompt = list(range(100, 100 + count))
    gram = [7, 8, 9, 10]
    for offset in (*offsets, count - 50):
        prompt[offset : offset + GRAM] = gram
    return tuple(prompt)


def test_what_the_end_says_again_is_kept_at_every_place_with_what_stands_around_it() -> None:
    """All of them: not only the first eight, as the rarest words are those that a question is about."""
    limit = ANCHORS[0][2]
    offsets = [2500 + 200 * at for at in range(limit)]
    found = chosen(repeating(offsets, 6400), 4800)
    for offset in offsets:
        middle = offset // PIECE
        assert tokens_of((((middle - 2) * PIECE, (middle + 3) * PIECE),)) <= tokens_of(found.spans)


def test_what_stands_around_words_that_meet_by_chance_leaves_room_for_the_other_places() -> None:
    """Two places, and a budget that holds both, but not what is around the first."""
    end = tuple(range(20_000, 20_096))
    prompt = [*range(3, 3 + 3000), *end]
    prompt[200:204], prompt[2000:2004] = end[10:14], end[60:64]
    kept = tokens_of(chosen(tuple(prompt), 300).spans)
    assert {*range(200, 204), *range(2000, 2004)} <= kept


def test_the_best_scores_are_kept_before_what_the_end_says_again() -> None:
    """The end of a file says much that stands in all of it, and a question is about one line."""
    prompt = repeating([1000 + 200 * at for at in range(ANCHORS[0][2])])
    scores = [0.0] * len(prompt)
    scores[2944:2976] = [1.0] * 32  # between two anchors
    found = chosen(prompt, 12 * PIECE, scores=scores)
    assert found.tokens == 12 * PIECE
    assert (2944, 2976) in [span for span in found.spans if span not in found.forced]


def test_what_is_kept_anyway_takes_no_room_from_the_best_scores() -> None:
    """A question is what is looked at most, and stands at the end."""
    prompt = repeating([1000 + 200 * at for at in range(ANCHORS[0][2])])
    scores = [0.0] * 3200
    scores[2944:2976], scores[-4 * PIECE :] = [0.5] * 32, [1.0] * 4 * PIECE
    assert (2944, 2976) in chosen(prompt, 12 * PIECE, scores=scores).spans


def test_what_is_said_everywhere_anchors_nothing() -> None:
    limit = ANCHORS[0][2]
    found = chosen(repeating([1000 + 150 * at for at in range(limit + 1)]), 3 * (HEAD + TAIL))
    assert found.forced == ((0, HEAD), (3200 - TAIL, 3200))


@pytest.mark.parametrize("offsets", [[1000], [1000, 1400, 1800]])
def test_anchors_stay_within_the_budget(offsets: list[int]) -> None:
    found = chosen(repeating(offsets), 9 * PIECE)
    assert found.tokens <= 9 * PIECE
