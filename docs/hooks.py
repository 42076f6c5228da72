"""For mkdocs: pages that stand at the top of the repository are pages of the site, too, and links find them there."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Links of such a page lead into docs/, where it now is. What pages link to, to read, comes along."""
    for name in PAGES:
        content = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=content))
    for path in (ROOT / "Containerfile", *sorted((ROOT / "deploy").iterdir())):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs' own
    """A link out of docs/ leads to one of those. From a page in a folder, `../` is docs/ itself."""
    if "/" in page.file.src_uri:
        return markdown.replace("](../../", "](../")
    return markdown.replace("](../", "](")
