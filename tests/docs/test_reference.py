"""docs/REFERENCE.md is what the code says now."""

from __future__ import annotations

from tests.docs.reference import PAGE, page


async def test_the_page_in_the_documents_is_up_to_date() -> None:
    """`make reference` writes it again."""
    assert PAGE.read_text() == await page()
