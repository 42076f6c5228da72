"""The table of families in docs/MODELS.md is what the code says now."""

from __future__ import annotations

import pytest

from adapters.models import MISSING, MISSING_ARCHITECTURES
from tests.docs.families import PAGE, check_names, write_page


@pytest.mark.timeout(120)
def test_the_table_in_the_documents_is_up_to_date() -> None:
    """`python -m tests.docs.families` writes it again."""
    check_names()
    assert PAGE.read_text() == write_page(PAGE.read_text())


def test_what_is_refused_by_name_is_in_the_documents() -> None:
    page = PAGE.read_text()
    assert all(f"`{kind}`" in page for kind in (*MISSING, *MISSING_ARCHITECTURES))
