"""The prose of a Markdown page: its paragraphs and list items, without code, tables, headings and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import fmean

FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^(\s*)(?:[*+-]|\d+\.)\s+")
NO_PROSE = re.compile(r"^\s*(?:#|\||<|!\[|→|\[[^\]]+\]:)")
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[^a-z])")
WORD = re.compile(r"[^\W_][\w'./,:%-]*")


def list_prose_lines(text: str) -> list[str]:
    """Return the page line by line, with an empty line in the place of everything that is no prose."""
    lines = list[str]()
    indents = [0]  # of the text of the list items that a line may continue
    follows_prose = False
    for line in FENCED.sub(lambda match: "\n" * match[0].count("\n"), text).splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip() or NO_PROSE.match(line):
            lines.append("")
            follows_prose = False
            continue
        item = ITEM.match(line)
        if item is None and not follows_prose and indent >= 4 and indent not in indents:
            lines.append("")  # a line of code
            continue
        if item is not None:
            indents = [one for one in indents if one <= len(item[1])] + [item.end()]
        elif indent == 0:
            indents = [0]
        lines.append(line)
        follows_prose = True
    return lines


def list_paragraphs(text: str) -> Iterator[str]:
    """Yield each paragraph and each list item as one line, with links as their texts and code as one word."""
    paragraph = list[str]()
    for line in [*list_prose_lines(text), ""]:
        if paragraph and (not line or ITEM.match(line)):
            yield simplify(" ".join(paragraph))
            paragraph = []
        if line:
            paragraph.append(ITEM.sub("", line).strip())


def simplify(paragraph: str) -> str:
    return LINK.sub(r"\1", CODE.sub("Code", paragraph))


def count_sentence_words(text: str) -> list[int]:
    """Return the number of words of every sentence of the page that has more than two."""
    sentences = (one for paragraph in list_paragraphs(text) for one in SENTENCE_END.split(paragraph))
    return [count for count in (len(WORD.findall(one)) for one in sentences) if count > 2]


def average_sentence(text: str) -> float:
    """Return the mean number of words of a sentence; 0 where there are none."""
    counts = count_sentence_words(text)
    return fmean(counts) if counts else 0
