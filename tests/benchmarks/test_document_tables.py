"""Tables of documents that are made of results: up to date, and without figures that no file has."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.document_tables import TABLES, DocumentTable, name_packing, say_found, write_pages


def test_the_tables_of_documents_are_those_of_the_results() -> None:
    """`python -m benchmarks.document_tables` writes them again."""
    for path, page in write_pages().items():
        assert path.read_text(encoding="utf-8") == page, path.name


def test_a_table_stands_between_two_comments() -> None:
    table = DocumentTable(Path("page.md"), "sizes", ("a", "b"), lambda _: iter([("1", "2")]))
    page = table.write("before\n<!-- sizes: begin -->\nold\n<!-- sizes: end -->\nafter", {})
    assert page == "before\n<!-- sizes: begin -->\n| a | b |\n| --- | --- |\n| 1 | 2 |\n<!-- sizes: end -->\nafter"
    assert table.write(page, {}) == page
    with pytest.raises(ValueError, match=r"page\.md has no table sizes"):
        table.write("nothing", {})


@pytest.mark.parametrize(
    ("weights", "name"),
    [("wide", ""), ("wide:int8", "int8"), ("models/wide-Q4_K_M.gguf", "Q4_K_M"), ("wide-fp8-static", "fp8-static")],
)
def test_a_packing_is_named_by_its_file(weights: str, name: str) -> None:
    assert name_packing(weights) == name


def test_tables_without_results_have_no_figures() -> None:
    for table in TABLES:
        assert all(not any(cell.endswith("%") for cell in row) for row in table.rows({}))
    assert say_found([], "rows", "int8", 8192) == ""
    line = {"rows": "int8", "tokens": 8192, "texts": 8, "found": 7}
    assert say_found([line], "rows", "int8", 8192) == "7 of 8"
