"""`rekindle bench speculation`: logged answers are given once more, and proposals are counted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from adapters.models.kernels.factory import build_text_matcher
from engine.settings.user_error import UserError
from engine.tools.bench.speculation_bench import run_speculation_bench
from engine.tools.bench.speculation_options import SpeculationBenchOptions
from engine.tools.simulation.acceptance_profile import parse_profile

pytestmark = pytest.mark.skipif(build_text_matcher() is None, reason="there is no compiled library")


def write_log(path: Path, *texts: tuple[str, str]) -> Path:
    """Each text is a request of its own session: a prompt and its answer."""
    lines = [
        {"timestamp": 1_000_000 * at, "input": prompt, "output": answer, "session_id": str(at)}
        for at, (prompt, answer) in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def measure(log: Path, capsys: pytest.CaptureFixture[str], **options: object) -> dict[str, object]:
    wanted = SpeculationBenchOptions(log=(log,), draft="suffix", json=True, **options)  # type: ignore[arg-type]
    assert run_speculation_bench(wanted) == 0
    chains, trees = json.loads(capsys.readouterr().out)
    assert (chains["draft"], trees["draft"]) == ("suffix", "suffix, trees")
    assert trees["tokens"] == chains["tokens"]
    return chains


def test_an_answer_that_repeats_its_prompt_is_copied_and_another_one_is_not(tmp_path, capsys) -> None:
    rng = random.Random(0)
    text = " ".join(rng.choice(("def", "return", "value", "if", "self", "import", "for")) for _ in range(60))
    other = " ".join(str(rng.randrange(10**6)) for _ in range(40))
    copied = measure(write_log(tmp_path / "copied.jsonl", (text, text)), capsys, answer_tokens=48)
    assert (copied["draft"], copied["requests"], copied["tokens"]) == ("suffix", 1, 48)
    assert copied["tokens_per_step"] > 2
    assert copied["accepted"] > 20
    check_profile(copied)
    new = measure(write_log(tmp_path / "new.jsonl", (text, other)), capsys, answer_tokens=48)
    assert new["tokens"] == 48
    assert new["accepted"] < copied["accepted"] // 4
    assert new["steps"] == new["tokens"] - new["accepted"]


def check_profile(found: dict[str, object]) -> None:
    """The profile gives the tokens of a step that were measured, but for the last step, which proposes fewer."""
    profile = parse_profile(found)
    assert 0 < len(profile.right) <= 7
    assert profile.tokens_per_step == pytest.approx(found["tokens"] / found["steps"], rel=0.1)  # type: ignore[operator]


def test_a_log_without_answers_is_refused(tmp_path) -> None:
    log = write_log(tmp_path / "empty.jsonl", ("a prompt", ""))
    with pytest.raises(UserError, match="no request there has a prompt and an answer"):
        run_speculation_bench(SpeculationBenchOptions(log=(log,), draft="suffix"))
