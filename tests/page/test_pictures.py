"""A browser that takes pictures, as `tests.pictures` and `benchmarks.screenshots` do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Browser, found

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.timeout(60)
async def test_a_browser_takes_a_picture_of_a_page(tmp_path: Path) -> None:
    program = found()
    if program is None:
        pytest.skip("no Chromium here: Debian's package is `chromium`")
    document = tmp_path / "page.html"
    document.write_text("<!doctype html><title>A page</title><p>Words.")
    async with (
        Browser.opened(program, tmp_path / "profile", takes_pictures=True) as browser,
        browser.page(document.as_uri(), width=300, height=200) as page,
    ):
        assert (await page.picture()).startswith(PNG)
