"""Trees are grown only for targets that can verify them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.loading.drafts.load_draft import DraftNeighbours


@pytest.mark.parametrize(("obstacle", "nodes"), [("", 22), ("each node would need a recurrent state of its own", 0)])
def test_a_target_that_verifies_chains_only_gets_no_trees(obstacle: str, nodes: int) -> None:
    parts: Any = SimpleNamespace(states=SimpleNamespace(tree_obstacle=obstacle))
    unused: Any = None
    assert DraftNeighbours(parts, unused, unused, unused).limit_nodes(22) == nodes
