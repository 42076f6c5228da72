"""The codec that `--kv-cache-codec auto` chose, kept in the cache folder, so that every start writes files alike."""

from __future__ import annotations

from contextlib import suppress

from attrs import define

from adapters.store.disk.file_names import CHOICE
from adapters.store.disk.folder_upkeep import FolderUpkeep
from adapters.store.files.codec import CodecChooser, Fixed

MAX_FILE_BYTES = 16  # one word and a line's end
CODECS_BY_TEXT: dict[bytes, Fixed] = {b"zstd\n": "zstd", b"store\n": "store"}


@define(eq=False)
class CodecChoiceFile:
    """The file `auto-codec` of one folder. Removing it makes the next start choose again.

    It holds one word, for all identities: the choice depends on the disk and the machine.
    """

    upkeep: FolderUpkeep
    chooser: CodecChooser
    kept: Fixed | None = None  # what `auto` chose at an earlier start

    def read(self, listing: dict[str, int]) -> None:
        """Read the earlier choice, if there is one and the file is not damaged.

        listing: names and sizes of the folder's files, as it was at the start.
        """
        if CHOICE not in listing:
            return
        small = listing[CHOICE] <= MAX_FILE_BYTES
        found = CODECS_BY_TEXT.get(self.upkeep.read_small(CHOICE, MAX_FILE_BYTES)) if small else None
        if found is None:
            self.upkeep.report_rebuilt("codec", "the codec that auto had chosen")
        self.kept = found

    def get_written_codec(self, measured: Fixed) -> Fixed:
        """Return the codec of files that are written from now on. measured: what `auto` would choose now."""
        return self.kept or measured if self.chooser.codec == "auto" else self.chooser.codec

    def settle(self, measured: Fixed) -> None:
        """Settle what `auto` writes: as an earlier start chose, or else as was measured now, which is kept.

        Where it cannot be written, the next start chooses again.
        """
        self.chooser.measured_choice = self.get_written_codec(measured)
        if self.chooser.codec == "auto" and self.kept is None:
            self.kept = measured
            with suppress(OSError):
                self.upkeep.folder.write_file(CHOICE, [measured.encode() + b"\n"])
