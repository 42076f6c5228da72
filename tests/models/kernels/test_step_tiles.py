"""Plans of attention: rows of several slots share a tile where their slots begin with the same pages.

With a window, a tile has no splits before it. Decode rows may have tiles apart from rows of prompts.
"""

from __future__ import annotations

import pytest

from tests.child_code import check_interpreted


@pytest.mark.long
@pytest.mark.parametrize("check", ["check_shared_tiles", "check_windows", "check_rows_apart"])
def test_every_split_of_every_row_is_computed_once_whether_or_not_rows_share_tiles(check):
    check_interpreted(f"from tests.models.kernels.interpreted_tiles import {check}; {check}()", 500)
