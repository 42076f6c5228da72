"""What the engine was started with, as far as decisions depend on it. Part of the trace's header."""

from __future__ import annotations

from attrs import field, frozen

from effects.ids import MAIN, PAGE, LaneId
from states.rates import Rates
from states.residency import Resolved

MOST_SLOTS = 1 << 12
MOST_EXPERTS = 1 << 16  # as adapters bound those of all layers


@frozen
class Settings:
    slots: int = 2  # sequences that are on the device at once
    max_context: int = 8192  # rows of a slot: prompt and answer together
    pages: int = 0  # that all slots take theirs from; 0: each slot has `max_context` rows of its own
    page: int = PAGE  # rows of one
    shares_pages: bool = False  # slots may have the same page; not where rows that are there may be computed again
    max_queue: int = 64  # requests that may wait for a slot; more are refused
    chunk: int = 256  # C: rows of a prefill chunk, the largest bucket
    block_size: int = 64  # G: cache positions are its multiples (equals `chunk` where the buckets is not proven)
    keep_decoded: bool = True  # decoded rows equal prefilled ones (the buckets is proven), so they stay cached
    batch_rows: int = 16  # rows of one batched decode step, proposals included
    mixed_rows: int = 0  # of a forward that has decode steps and the next rows of a prompt; 0: they take turns
    beside_rows: int = 0  # prefills of more rows than that have a lane of their own, beside decode steps; 0: none have
    store: bool = False  # host memory or disk keep blocks
    min_tokens: int = 0  # sequences shorter than this are not kept beyond the device
    stateful: bool = False  # the model has positional state that blocks do not hold: a hit needs a checkpoint too
    state_places: int = 0  # checkpoints that the device keeps, beside the state of each slot
    state_tokens: int = 0  # a checkpoint takes as many bytes as the rows of so many tokens
    interval: int = 0  # `full` keeps a checkpoint every so many tokens; 0: only where it ends
    cold_max: int = 0  # `full` keeps one at the last safe boundary up to here, for what other sessions share; 0: none
    block: int = 0  # tokens that a draft proposes a decode step at most; 0: there is no draft
    tree: int = 0  # nodes of a proposed tree; 0: proposals are a chain
    no_trees: bool = False  # they were asked for, but a state stands behind one row and not behind each node
    residency: Resolved = field(factory=Resolved)  # what becomes of the draft's weights between requests
    drafter: int = 0  # tokens of a prompt that can be scored at most; 0: there is no drafter
    drafter_lane: LaneId = MAIN  # of the device that scores prompts: the target's, or one of its own
    span: int = 1  # chunks that one prefill may be of: more where shards compute side by side, or beside decode steps
    experts: int = 0  # of all layers, that host memory keeps; 0: they are where the layers are
    expert_places: int = 0  # for so many of them on the device
    rates: Rates = field(factory=Rates)  # as measured at start

    def __attrs_post_init__(self) -> None:
        """Settings also come out of traces, which are hostile input: ValueError for what no engine runs with."""
        positive = (self.slots, self.max_context, self.chunk, self.span, self.block_size, self.batch_rows, self.page)
        natural = (
            *(self.max_queue, self.min_tokens, self.interval, self.cold_max, self.block, self.tree),
            *(
                self.mixed_rows,
                self.beside_rows,
                self.pages,
                self.drafter,
                self.drafter_lane,
                self.state_places,
                self.state_tokens,
            ),
            *(self.expert_places, self.experts - self.expert_places, MOST_EXPERTS - self.experts),
        )
        limit = MOST_SLOTS - max(self.slots, self.state_places)
        if self.shares_pages and self.stateful:
            raise ValueError("rows before a state that was lost are computed again: nobody may share them")
        if self.beside_rows and (self.stateful or self.block):
            raise ValueError(
                "what goes with a prompt's rows, a state or a draft's context, is the decode steps' lane's"
            )
        if self.span > 1 and self.chunk <= self.beside_rows:
            raise ValueError(f"several chunks of {self.chunk} rows: so few are on the decode steps' lane")
        if 0 < self.pages * self.page < self.max_context:
            raise ValueError(f"{self.pages} pages do not hold the longest sequence, {self.max_context} rows")
        if min(positive) < 1 or min(natural) < 0 or self.chunk % self.block_size or limit < 0:
            raise ValueError(f"settings that cannot be: {self}")


@frozen
class DecisionContext:
    """What decisions rest on that is no request's own: an argument of every arrow."""

    settings: Settings = field(factory=Settings)
    rates: Rates = field(factory=Rates)  # as they are now
