"""What an answer was copied from is known after a restart, for its salt only, and where its scope allows that."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.kernels.factory import build_text_matcher
from benchmarks.exactness import together
from effects.ids import RequestId, Tokens
from effects.job import Job
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.settings.options import build_options
from tests.device.speculation.test_suffix_proposals import a_state

pytestmark = pytest.mark.skipif(build_text_matcher() is None, reason="there is no compiled library")
JOBS = {
    salt: Job(tuple(range(first, first + 20)), 40, scope=Scope(scope), salt=salt)
    for first, (salt, scope) in enumerate((("full", "full"), ("off", "off")), 300)
}


async def load(folder: Path) -> LoadedModel:
    kept = {"kv_cache_dir": folder / "kv", "kv_cache_min_tokens": 0, "host_cache_budget": 0, "max_ctx": 1024}
    return await load_target(build_options(model="demo", draft="suffix", device="cpu", **kept))


def find_match(target: LoadedModel, text: Tokens, salt: str) -> int:
    """Return how many tokens before the end of a text agree with what the server knows of this salt."""
    proposer = target.executor.parts.text_proposer
    assert isinstance(proposer, SuffixProposer)
    state = a_state([*text], RequestId(1), salt=salt)
    return proposer.find_matches([(3, state)])[0]


async def test_answers_are_copied_from_after_a_restart(tmp_path: Path) -> None:
    target = await load(tmp_path)
    found = await together(target, list(JOBS.values()), at_once=1)
    await target.close()
    answers = {salt: one.tokens for salt, one in zip(JOBS, found, strict=True)}
    assert len(answers["full"]) > 30
    target = await load(tmp_path)
    for salt, answer in answers.items():
        asked = answer[:20]
        expected = find_match_within(asked)
        matched = find_match(target, asked, salt)
        assert (matched > expected) == (salt == "full"), salt
        assert find_match(target, asked, "another salt") == expected
    assert target.transfer is not None
    again = await together(target, list(JOBS.values()), at_once=1)
    assert [one.tokens for one in again] == [one.tokens for one in found]
    await target.close()


def find_match_within(text: Tokens) -> int:
    """Return the longest match of the end of a text in the text itself, which a server without any answer finds."""
    lengths = [next((n for n in range(at) if text[at - 1 - n] != text[-1 - n]), at) for at in range(3, len(text))]
    longest = max(lengths)
    return longest if longest >= 3 else 0
