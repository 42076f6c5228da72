"""Groups the content of a cache folder by identity, which stands for a model and its numerics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen
from rich.console import Console

from adapters.store.block_keys import compute_root
from adapters.store.disk import survey_folder
from adapters.store.disk.survey_folder import Survey, SurveyedFile
from adapters.store.files.private_folder import FolderUnusable, PrivateFolder
from engine.settings.output.formatting import WIDTH
from engine.settings.user_error import UserError

SHOWN_IDENTITY = 12  # hex digits of an identity


@frozen
class Identity:
    """The files of one identity."""

    name: str
    block_size: int
    files: tuple[SurveyedFile, ...]

    @property
    def rows(self) -> list[SurveyedFile]:
        """The files with rows of the target, each once."""
        return [file for file in self.files if file.entry.kind == "rows"]

    @property
    def size(self) -> int:
        return sum(file.entry.size for file in self.files)

    @property
    def content(self) -> int:
        return sum(file.content for file in self.files)

    @property
    def tokens(self) -> int:
        """The tokens whose rows are kept, each once."""
        return sum(file.entry.length for file in self.rows)

    @property
    def used(self) -> int:
        return max(file.entry.last_turn for file in self.files)

    @property
    def hits(self) -> int:
        return sum(file.entry.hits for file in self.files)

    @property
    def origin(self) -> bytes:
        return compute_root(self.name, self.block_size)


def list_identities(found: Survey) -> list[Identity]:
    """Return the identities, the one that was used last first."""
    groups: dict[tuple[str, int], list[SurveyedFile]] = {}
    for file in found.kept:
        groups.setdefault((file.identity, file.block_size), []).append(file)
    identities = [Identity(name, block_size, tuple(files)) for (name, block_size), files in groups.items()]
    return sorted(identities, key=lambda identity: (-identity.used, identity.name))


@contextmanager
def open_for_reading(path: Path) -> Iterator[PrivateFolder]:
    """Open a cache folder for reading only. Raises UserError."""
    try:
        folder = survey_folder.open_for_survey(path)
    except FolderUnusable as error:
        raise UserError(str(error)) from error
    try:
        yield folder
    finally:
        folder.close()


def make_wide_console(console: Console) -> Console:
    return console if console.is_terminal else Console(width=WIDTH + 10)
