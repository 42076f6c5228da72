"""The size of documents, the width of their lines and the length of their sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import CARDS, DOCS, INTERNALS, PAGES, ROOT, name
from tests.docs.prose import average_sentence, count_sentence_words, list_prose_lines

COLUMNS = 100
MEAN_WORDS = 22  # of the sentences of a page
# Help texts and commands are as long as they are.
PAGE_WORDS = 500  # of a decision, which is one page
WORDS = {ROOT / "ARCHITECTURE.md": 3000, **dict.fromkeys(INTERNALS, 2500)}
LINES = {ROOT / "README.md": 90, DOCS / "GLOSSARY.md": 60}
BYTES = {DOCS / "BENCHMARKS.md": 25 * 1024}


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=name)
def test_lines_of_prose_are_wrapped(page: Path) -> None:
    lines = enumerate(list_prose_lines(page.read_text()), 1)
    assert [f"line {number}: {len(line)} columns" for number, line in lines if is_too_long(line)] == []


def is_too_long(line: str) -> bool:
    """Could the line be broken? The address of a link may be longer than a line."""
    return len(line) > COLUMNS and " " in line.strip()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_sentences_are_short_at_the_mean(page: Path) -> None:
    assert average_sentence(page.read_text()) <= MEAN_WORDS


@pytest.mark.parametrize("page", WORDS, ids=name)
def test_pages_about_the_code_have_few_words(page: Path) -> None:
    assert len(page.read_text().split()) <= WORDS[page]


@pytest.mark.parametrize("page", LINES, ids=name)
def test_short_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= LINES[page]


@pytest.mark.parametrize("page", BYTES, ids=name)
def test_pages_of_figures_are_small(page: Path) -> None:
    assert len(page.read_bytes()) <= BYTES[page]


def test_a_decision_is_one_page() -> None:
    decisions = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert [name(page) for page in decisions if len(page.read_text().split()) > PAGE_WORDS] == []


def test_every_hard_subject_has_its_page() -> None:
    subjects = {page.stem for page in INTERNALS}
    assert subjects >= {"cache-and-restore", "compression", "numerics", "speculation", "start-up"}
    assert all(f"internals/{subject}.md" in (ROOT / "ARCHITECTURE.md").read_text() for subject in subjects)


def test_the_life_of_a_request_has_twelve_steps() -> None:
    steps = re.findall(r"^(\d+)\. \*\*", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert steps == [str(number) for number in range(1, 13)]


def test_the_glossary_is_in_order_and_each_term_is_one_line() -> None:
    rows = (DOCS / "GLOSSARY.md").read_text().splitlines()[4:]
    terms = [row.split("|")[1].strip() for row in rows]
    assert terms == sorted(set(terms), key=str.lower)
    assert 40 <= len(terms) <= 60
    assert all(row.count("|") == 3 for row in rows)


# --- what counts as prose ---

PAGE = """# A heading that is longer than the others

A first sentence, with `code(of many, words)` and [a link](to/a/page.md). A second one
goes on in a second line!

    indented code is no prose at all

* An item of a list, e.g. this one,
  goes on here.
* Another.

| a | table |
|---|---|

```console
$ neither is this
```
"""


def test_prose_is_what_remains_without_code_tables_and_headings() -> None:
    lines = [line for line in list_prose_lines(PAGE) if line]
    assert [line.split()[0] for line in lines] == ["A", "goes", "*", "goes", "*"]


def test_sentences_end_at_their_ends_and_not_at_abbreviations() -> None:
    assert count_sentence_words(PAGE) == [8, 9, 11]


def test_a_long_line_and_a_long_sentence_are_noticed() -> None:
    assert [is_too_long(line) for line in ("word " * 30, "word", "w" * 150, "a" * 50)] == [True, False, False, False]
    assert average_sentence("word " * 30 + ".") > MEAN_WORDS
    assert average_sentence("One two three. " + "word " * 45 + ".") > MEAN_WORDS
