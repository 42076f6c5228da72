"""The documentation as a site: its colours, and that a browser needs nothing from elsewhere to show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STYLE = (ROOT / "docs" / "css" / "site.css").read_text()
CONFIGURATION = (ROOT / "mkdocs.yml").read_text()
LEAST_CONTRAST = 4.5  # WCAG 2.2, level AA, for text of ordinary size
LINKS = ("--md-typeset-a-color", "--md-accent-fg-color")  # at rest, and under the pointer
GROUNDS = ("--md-default-bg-color", "--md-code-bg-color")


def read_colours(scheme: str) -> dict[str, str]:
    """Return the variables of a colour scheme in the style sheet."""
    block = re.search(rf'\[data-md-color-scheme="{scheme}"\] {{(.*?)}}', STYLE, re.DOTALL)
    assert block is not None
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6});", block[1]))


def compute_luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG 2.2 defines it."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def compute_contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21."""
    low, high = sorted(map(compute_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_of_known_colours_is_as_wcag_says() -> None:
    assert compute_contrast("#000000", "#ffffff") == pytest.approx(21)
    assert compute_contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_links_and_texts_can_be_read(scheme: str) -> None:
    colours = read_colours(scheme)
    pairs = [(text, ground) for text in (*LINKS, "--md-default-fg-color") for ground in GROUNDS]
    pairs.append(("--md-primary-bg-color", "--md-primary-fg-color"))
    for text, ground in pairs:
        assert compute_contrast(colours[text], colours[ground]) >= LEAST_CONTRAST, f"{text} on {ground}"


def test_the_style_sheet_is_used_and_nothing_is_loaded_from_elsewhere() -> None:
    assert "extra_css: [css/site.css]" in CONFIGURATION
    assert CONFIGURATION.count("primary: custom") == CONFIGURATION.count("      scheme: ") == 2
    assert "font: false" in CONFIGURATION
    # The theme would load a library to draw such blocks, or to search in files.
    assert "mermaid" not in CONFIGURATION
    assert "offline" not in CONFIGURATION
    assert "://" not in CONFIGURATION + STYLE


def test_the_first_page_begins_with_a_command_and_the_menu_does_not_repeat_the_title() -> None:
    lines = (ROOT / "docs" / "index.md").read_text().splitlines()
    assert any(line.startswith("    make serve") for line in lines[:5])
    assert "- Start here: index.md" in CONFIGURATION
    assert "- Rekindle:" not in CONFIGURATION
