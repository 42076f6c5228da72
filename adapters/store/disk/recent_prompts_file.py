"""Keeps the recent prompts of one identity, or its recent answers, in a file, read at the start and then appended to.

Scope `auto` compares new prompts with these, to choose how much of a prompt is worth keeping. They also tell where a
prompt that missed the cache differs from an earlier one (`recent_prompts.py`).
"""

from __future__ import annotations

from typing import Literal

from attrs import define

from adapters.store import recent_prompts
from adapters.store.disk.file_names import classify_name, format_list_name
from adapters.store.disk.folder_upkeep import FolderUpkeep
from adapters.store.recent_prompts import RecentPrompt, RecentPrompts

MAX_FOREIGN_FILES = 8  # of other identities


@define(eq=False)
class RecentPromptsFile:
    """The file of recent prompts. The thread that opens the tier loads it, and then only the tier's writer uses it.

    A damaged file is read up to the damage and replaced. One that is larger than it can be is not read, and replaced.
    One of a newer version is left alone. All of this is noted.

    kind: of its name, which is also the label of its damage (`file_names.py`). description: of what is in it.
    origin: the root of the identity's block keys, which names the file. has_lost_prompt: a prompt was not written.
    Later prompts may refer to it, so the next call writes the whole file. Any thread may set it.
    """

    prompts: RecentPrompts
    origin: bytes
    upkeep: FolderUpkeep
    kind: Literal["recent", "answers"] = "recent"
    description: str = "recent prompts"
    has_lost_prompt: bool = False
    _bytes: int = 0  # size of the file; 0: it is written from the beginning
    _last: int = 0  # serial number of the last prompt in the file
    _is_newer: bool = False  # a newer version has written it, so nothing is written here

    @property
    def name(self) -> str:
        return format_list_name(self.kind, self.origin)

    def load(self, listing: dict[str, int]) -> None:
        """Read the prompts of this identity's file. Of those of other identities, the first MAX_FOREIGN_FILES stay.

        listing: names and sizes of the folder's files. The files of prompts are taken out of it.
        """
        others = sorted(name for name in listing if classify_name(name) == self.kind and name != self.name)
        for name in others[MAX_FOREIGN_FILES:]:
            self.upkeep.remove(name)
        for name in others:
            del listing[name]
        if self.name not in listing:
            return
        self._bytes = listing.pop(self.name)
        most = 2 * self.prompts.max_bytes + 2 * recent_prompts.SLACK
        is_small = self._bytes <= most
        raw = self.upkeep.read_small(self.name, -1 if is_small else recent_prompts.MAGIC_BYTES)
        if recent_prompts.is_newer(raw):
            self._is_newer = True
            self.upkeep.report_newer(f"the list of {self.description}")
        elif not is_small or not recent_prompts.restore_prompts(raw, self.prompts):
            self._bytes = 0  # the next prompt writes the whole file
            which = f"the list of {self.description}, {len(self.prompts)} of which could be read"
            self.upkeep.report_rebuilt(self.kind, which)

    def write_prompt(self, prompt: RecentPrompt) -> None:
        """Append a prompt, or write the whole file if it has lost one or is over twice as long as its prompts.

        Raises OSError. After a failure the next call writes the whole file.
        """
        if self._is_newer or prompt.serial <= self._last:
            return  # a whole file that was written meanwhile has this prompt, or a newer version has its own list
        before = self._bytes
        self._bytes = 0
        kept = [prompt]
        lost = self.has_lost_prompt
        self.has_lost_prompt = False
        if before and not lost and before <= 2 * self.prompts.held_bytes + recent_prompts.SLACK:
            raw = recent_prompts.encode_prompt(prompt)
            self.upkeep.folder.extend_file(self.name, raw)
            self._bytes = before + len(raw)
        else:
            kept = self.prompts.list_prompts() or kept
            raw = b"".join(recent_prompts.encode_snapshot(kept))
            self.upkeep.folder.write_file(self.name, [raw])
            self._bytes = len(raw)
        self._last = kept[-1].serial
