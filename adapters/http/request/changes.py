"""Record what the server changed in a request instead of refusing it. The answer's header and the log show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field

HEADER = "x-rekindle-request-changed"


@define
class Changes:
    """The kinds of changes, each once, in the order in which they were made. docs/APIS.md explains each kind."""

    kinds: dict[str, None] = field(factory=dict)

    def note(self, *kinds: str) -> None:
        """Remember that these kinds of changes were made."""
        self.kinds.update(dict.fromkeys(kinds))

    def note_names(self, sent: Iterable[str | None]) -> None:
        """Remember that tools have other names for the model. sent: the clients' names; None: the name is the same."""
        if any(name is not None for name in sent):
            self.note("tool-name")

    @property
    def headers(self) -> Mapping[str, str]:
        return {HEADER: " ".join(self.kinds)} if self.kinds else {}
