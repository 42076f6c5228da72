"""What `--kv-cache-codec auto` chose, kept in the cache folder: every start writes files as the first one did."""

from __future__ import annotations

from contextlib import suppress

from attrs import define

from adapters.store.file_names import CHOICE
from adapters.store.files.codec import Fixed
from adapters.store.folder_upkeep import FolderUpkeep

MAX_FILE_BYTES = 16  # one word and a line's end
CODECS_BY_TEXT: dict[bytes, Fixed] = {b"zstd\n": "zstd", b"store\n": "store"}


@define(eq=False)
class CodecChoiceFile:
    """The file `auto-codec` of one folder. Removing it makes the next start choose again.

    It holds one word, for all identities: the choice depends on the disk and the machine.
    """

    upkeep: FolderUpkeep

    def read(self, listing: dict[str, int]) -> Fixed | None:
        """Return the earlier choice; None where there is none, or where the file is damaged.

        listing: names and sizes of the folder's files, as it was at the start.
        """
        if CHOICE not in listing:
            return None
        small = listing[CHOICE] <= MAX_FILE_BYTES
        found = CODECS_BY_TEXT.get(self.upkeep.read_small(CHOICE, MAX_FILE_BYTES)) if small else None
        if found is None:
            self.upkeep.report_rebuilt("codec", "the codec that auto had chosen")
        return found

    def write(self, chosen: Fixed) -> None:
        """Keep it. Where that fails, the next start chooses again."""
        with suppress(OSError):
            self.upkeep.folder.write_file(CHOICE, [chosen.encode() + b"\n"])
