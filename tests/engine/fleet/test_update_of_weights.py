"""A fleet that gets other weights while requests flow. It takes some minutes on two cores, and 2 GiB."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fleet_update import OTHER, run_updates, update_parser
from tests.engine.fleet.test_real_fleet import find_free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("between", [OTHER, "demo-hybrid"])
def test_no_request_fails_and_no_answer_is_of_mixed_weights(tmp_path: Path, between: str) -> None:
    """The first model comes back in the end, and finds its rows in the shared tier."""
    words = ["--models", f"demo,{between},demo", "--port", str(find_free_port()), "--quiet", "2"]
    row = run_updates(update_parser().parse_args(words), tmp_path)
    assert not row["failed"], row["failures"]
    assert not row["of_unknown_replicas"]
    assert not row["different"], "an answer is that of a server with the weights of its replica"
    assert row["answers_of_demo"] > 20
    assert row[f"answers_of_{between}"] > 20
    assert not row["restored_of_other_models"]
    assert all(row["restored_again"]), "the shared tier brings what the other replica has read"
    assert all(row["restored_when_back"])
