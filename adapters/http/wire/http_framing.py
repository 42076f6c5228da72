"""What h11 reads of a connection, read more strictly: lines, and how much of a body is announced.

h11 takes a line of a head that ends with a bare line feed. A proxy before the server may not, and then the two see
different requests in the same bytes. It also tells of a chunk when the first byte of it comes, so that a client could
announce more than a server takes and have it wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import define
from h11 import LocalProtocolError
from h11._receivebuffer import ReceiveBuffer

SIZE = re.compile(rb"[0-9A-Fa-f]{1,20}")


@define(eq=False)
class StrictReceiveBuffer(ReceiveBuffer):
    """announced: hears the size of each chunk when the chunk's own line is read."""

    announced: Callable[[int], None]

    def __attrs_post_init__(self) -> None:
        super().__init__()

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head, or of what follows a chunked body. Raises LocalProtocolError for a bare LF."""
        before = len(self)
        lines: list[bytearray] | None = super().maybe_extract_lines()
        # each line had two bytes behind it, and so had the empty one
        if lines is not None and before - len(self) != sum(map(len, lines)) + 2 * (len(lines) + 1):
            raise LocalProtocolError("a line of the head ends with a bare line feed")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line of a chunk. h11 checks it; what is no size is announced by nobody."""
        line: bytearray | None = super().maybe_extract_next_line()
        if line is not None and (size := SIZE.match(line)):
            self.announced(int(size[0], 16))
        return line
