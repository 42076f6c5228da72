"""Read the framing of HTTP more strictly than h11 does: the ends of lines, and the announced sizes of chunks.

h11 accepts a line of a head that ends with a bare line feed. A proxy before the server may not, and then the two see
different requests in the same bytes. h11 also reports a chunk only when its first byte arrives. A client could
therefore announce more than a server accepts, and keep it waiting.
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
    """A receive buffer that refuses bare line feeds. It gives `on_chunk_size` the size of each chunk once the chunk's
    own line is read.
    """

    on_chunk_size: Callable[[int], None]

    def __attrs_post_init__(self) -> None:
        super().__init__()

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head, or of what follows a chunked body. Raises LocalProtocolError for a bare LF."""
        before = len(self)
        lines: list[bytearray] | None = super().maybe_extract_lines()
        # Two bytes end each line, and the empty line as well.
        if lines is not None and before - len(self) != sum(map(len, lines)) + 2 * (len(lines) + 1):
            raise LocalProtocolError("a line of the head ends with a bare line feed")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line of a chunk. h11 checks it; a line that is no size is not reported."""
        line: bytearray | None = super().maybe_extract_next_line()
        if line is not None and (size := SIZE.match(line)):
            self.on_chunk_size(int(size[0], 16))
        return line
