"""For mkdocs: pages that stand at the top of the repository are pages of the site, too, and links find them there."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, whose links lead into docs/, and the files that pages link to."""
    for name in PAGES:
        content = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", (ROOT / name).read_text())
        files.append(File.generated(config, name, content=content))
    for path in (ROOT / "Containerfile", *sorted((ROOT / "deploy").iterdir())):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs' own
    """Turn links that leave docs/ into links to the pages and files that were added."""
    depth = page.file.src_uri.count("/")
    return markdown.replace("](" + "../" * (depth + 1), "](" + "../" * depth)
