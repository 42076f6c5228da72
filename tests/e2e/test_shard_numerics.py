"""A shard in another process that multiplies otherwise than this one: its class is part of the identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapters.models.kernels.factory import explain_missing_library
from engine.settings.shard_secret import VARIABLE
from tests.e2e.prepared import listening, serving
from tests.e2e.test_restart import kill, written

SECRET = "known to both of them"  # noqa: S105 - of this test
SWITCH = "REKINDLE_NATIVE"
CODE = "class Reader:\n    def __init__(self, path):\n        self.path = path\n" * 8
BODY: dict[str, Any] = {"prompt": CODE, "max_tokens": 12, "temperature": 0, "logprobs": 2}


@pytest.mark.timeout(300)
def test_rows_are_restored_only_where_both_processes_compute_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second life's shard has no compiled library. So it finds nothing of the first, and the third does again."""
    if explain_missing_library():
        pytest.skip("there is one way to multiply here")
    monkeypatch.setenv(VARIABLE, SECRET)
    words = ("--kv-cache-dir", str(tmp_path), "--kv-cache-min-tokens", "64", "--max-ctx", "512", "--draft", "none")
    answers = list[dict[str, Any]]()
    classes = list[str]()
    for way in ("on", "off", "on"):
        monkeypatch.setenv(SWITCH, way)
        with listening("demo", "--device", "cpu", secret=SECRET, address="tcp://127.0.0.1:0") as (_, address):
            monkeypatch.delenv(SWITCH)
            with serving("demo", *words, "--target-devices", f"cpu:0,{address}", trusting=True) as server:
                classes.append(server.client.get("/props").json()["numerics"]["class"])
                answers.append(server.complete(**BODY).json())
                written(server)
                kill(server)
    first, other, again = answers
    assert classes[0] == classes[2] != classes[1]
    assert classes[1].count("layers ") == 2
    assert classes[1].count("native-") < classes[1].count("onednn-")
    assert [answer["rekindle"]["tier"] for answer in answers] == ["none", "none", "disk"]
    assert other["rekindle"]["restored_tokens"] == 0
    assert again["choices"] == first["choices"]
