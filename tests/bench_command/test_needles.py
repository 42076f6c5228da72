"""Tests of `rekindle bench needles`: the texts, and what it prints for a server that answers and for one that does not
compress.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree as ET

import anyio
import pytest

from engine.__main__ import main
from engine.settings.output import plot_style
from engine.tools.bench.haystack import Haystack, Needle, build_haystack, count_words, keep_last, keep_random
from engine.tools.bench.needles import METHODS, fill_cell
from engine.tools.bench.needles_cell import Cell as Question
from engine.tools.bench.needles_plot import draw_needles, mean_found_by
from tests.http.conftest import Site, served
from tests.text import small


@pytest.fixture
async def ours(tmp_path: Path) -> AsyncIterator[Site]:
    async with served(small.write(tmp_path)) as site:
        yield site


def hay(*depths: float, seed: int = 1, words: int = 600) -> Haystack:
    return build_haystack(Random(seed), words, depths)


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_a_needle_is_where_it_is_wanted(depth: float) -> None:
    text = hay(depth)
    index = text.lines.index(text.needles[0].line)
    assert index == round(depth * (len(text.lines) - 1))
    assert 500 < len(text.text().split()) < 700
    assert text.text().endswith(f"\n\nWhat is the secret number of {text.needles[0].person}?")


def test_several_are_of_different_people_and_all_asked_for() -> None:
    text = hay(0.2, 0.5, 0.8)
    assert len({needle.person for needle in text.needles}) == 3
    assert all(needle.person in text.question and needle.line in text.lines for needle in text.needles)
    one, other, _ = text.needles
    assert text.score_answer(f"{one.number} and {other.number}") == pytest.approx(2 / 3)
    assert text.score_answer("I do not know.") == 0


def test_the_same_seed_is_the_same_text() -> None:
    assert hay(0.5) == hay(0.5) != hay(0.5, seed=2)


@pytest.mark.parametrize("share", [0.05, 0.3, 1])
def test_who_shortens_blindly_gets_as_much_of_the_text(share: float) -> None:
    text = hay(0.5)
    for kept in (keep_last(text, share), keep_random(text, share, Random(7))):
        assert count_words(kept) <= share * count_words(text.lines) < count_words(kept) + 120
        assert [line for line in text.lines if line in kept] == kept, "in its order"
    assert keep_last(text, share)[-1] == text.lines[-1]


def printed(why: str | None = None) -> dict[str, Any]:
    compression = {"why": why, "kept_tokens": 20, "original_tokens": 200}
    return {
        "choices": [{"message": {"content": "It is 1234."}}],
        "usage": {"prompt_tokens": 200},
        "timings": {"prompt_ms": 7.5},
        "rekindle": {"compression": compression},
    }


def test_an_answer_is_read_and_what_was_not_compressed_is_none() -> None:
    text, question = Haystack(("x",), (Needle("Anna", 1234),)), Question("compressed", 200, 1, 0.5, 0)
    assert fill_cell(question, text, printed(), 0.5) == Question("compressed", 200, 1, 0.5, 0, 1.0, 200, 0.1, 7.5)
    assert fill_cell(question, text, printed("tools"), 0.5).error == "it was not compressed: tools"
    whole = Question("whole", 200, 1, 0.5, 0)
    assert fill_cell(whole, text, {**printed(), "rekindle": {"compression": None}}, 0.5).kept == 1
    with pytest.raises(LookupError):
        fill_cell(whole, text, {"choices": []}, 0.5)


async def test_a_server_that_does_not_compress_is_told_of(ours: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--url", str(ours.client.base_url), "--lengths", "150", "--needles", "1,2", "--depths", "0.5")
    run = partial(main, ["bench", "needles", *words, "--questions", "1", "--seed", "3"])
    assert await anyio.to_thread.run_sync(run) == 1
    shown = capsys.readouterr().out
    assert "2 without an answer: HTTP 400" in shown
    assert "this server has no drafter" in shown
    assert "--seed 3" in shown
    assert [line.split()[:3] for line in shown.splitlines()[2:4]] == [["150", "1", "0.5"], ["150", "2", "spread"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--depths", "2"], "from 0, the start of the text, to 1"),
        (["--lengths", "0"], "a number of tokens from 1"),
        (["--needles", "99"], "a number of needles from 1 to 20"),
        (["--keep", "0"], "--keep"),
        (["--url", "http://127.0.0.1:9"], "no server answers there"),
    ],
)
def test_every_wrong_word_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "needles", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_picture_has_a_line_for_each_method(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    questions = [Question(method, 100, 1, depth, 0, depth) for method in METHODS for depth in (0.0, 1.0)]
    questions += [Question(method, 100, 4, None, 0, 0.5) for method in METHODS]
    path = tmp_path / "needles.svg"
    plot_style.check_plot_path(path)
    draw_needles(path, questions, METHODS, "Needles")
    texts = {"".join(one.itertext()).strip() for one in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")}  # noqa: S314 - our own
    assert {*METHODS, "Several needles, % of them found", "One needle, 100 tokens, % found"} <= texts
    assert mean_found_by("depth", questions[:2]) == [(0.0, 0.0), (1.0, 1.0)]
