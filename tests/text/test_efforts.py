"""Tests of reasoning effort: what a template gets for levels that it does not accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.text.model_text import Text
from adapters.text.reasoning_efforts import EFFORTS, find_nearest
from tests.text import small

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
REFUSES = "{% if reasoning_effort in [LEVELS] %}{{ raise_exception('no such level') }}{% endif %}" + PLAIN
LOOKS_UP = "{{ {'low': 1, 'medium': 2}[reasoning_effort or 'low'] + 0 }}" + PLAIN


@pytest.mark.parametrize(
    ("accepted", "given"),
    [
        (EFFORTS, dict(zip(EFFORTS, EFFORTS, strict=True))),
        (("low", "medium", "xhigh"), {"minimal": "low", "high": "medium", "max": "xhigh", "none": None}),
        (("none", "low", "high"), {"none": "none", "minimal": "low", "medium": "low", "xhigh": "high", "max": "high"}),
        (("none", "max"), {"minimal": "max", "low": "max"}),
        (("none",), {"high": None}),
        ((), {"none": None, "max": None}),
    ],
)
def test_a_level_is_served_as_the_nearest_one(accepted: tuple[str, ...], given: dict[str, str | None]) -> None:
    assert {level: find_nearest(level, list(accepted)) for level in given} == given


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        (PLAIN, ()),
        (REFUSES.replace("LEVELS", "'minimal', 'high', 'max'"), ("minimal", "high", "max")),
        (LOOKS_UP, ("none", "minimal", "high", "xhigh", "max")),
    ],
)
async def test_what_a_template_accepts_is_found_by_rendering_it(
    tmp_path: Path, template: str, refused: tuple[str, ...]
) -> None:
    text = Text.load(small.write(tmp_path, template))
    try:
        await text.check()
        accepted = [level for level in EFFORTS if level not in refused]
        assert text.efforts == {level: find_nearest(level, accepted) for level in EFFORTS}
    finally:
        await text.aclose()
