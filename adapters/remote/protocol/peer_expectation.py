"""The model that a server expects a daemon to have, and the deadlines of its answers."""

from __future__ import annotations

from attrs import frozen


@frozen
class Deadlines:
    """Seconds that an answer may take. They are for daemons that hang; one that has died is noticed at once.

    prove: the probe of a model that was never served here. load: 100 GB from a slow disk. step: a chunk of a large
    model on few cores. The process that dials limits the time of a hello.
    """

    prove: float = 1800
    load: float = 1800
    step: float = 300


@frozen
class ExpectedModel:
    """The digests of the weights and of the configuration that a daemon must have."""

    weights: str
    config: str


# An answer waits for proposals, so a draft that hangs is given up long before layers: a round takes a second at most.
DRAFT_DEADLINES = Deadlines(step=10)
