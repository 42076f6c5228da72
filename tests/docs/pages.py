"""Every Markdown page that ships, and what the tests of the documents read of one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ABOVE = sorted(ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "README", "SECURITY"))
PAGES = [*ABOVE, *sorted(DOCS.rglob("*.md"))]
CARDS = sorted((ROOT / "adapters").rglob("*.md"))  # of the models that come with the package
INTERNALS = sorted((DOCS / "internals").glob("*.md"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))
