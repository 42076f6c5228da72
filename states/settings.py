"""Settings: what the engine was started with, as far as decisions depend on it. They are part of a trace's header."""

from __future__ import annotations

from attrs import field, frozen

from effects.ids import MAIN, PAGE, LaneId
from states.rates import Rates
from states.residency import Resolved

MOST_SLOTS = 1 << 12
MOST_EXPERTS = 1 << 16  # of all layers together; adapters have the same limit


@frozen
class Settings:
    """The settings of an engine. They never change while it runs."""

    slots: int = 2  # sequences that the device holds at once
    # Of these, so many more than requests are served at once. A request takes one while rows of an ended one are saved.
    spare_slots: int = 0
    max_context: int = 8192  # rows of a slot: prompt and answer together
    pages: int = 0  # of the pool that all slots share; 0: each slot has memory for `max_context` rows of its own
    page: int = PAGE  # rows of a page
    shares_pages: bool = False  # two slots may have the same page; off where rows may be computed again in place
    max_queue: int = 64  # requests that may wait for a slot; further ones are refused
    chunk: int = 256  # C: rows of a prefill chunk, which is the largest bucket
    block_size: int = 64  # G: rows are reused in multiples of it; it equals `chunk` where buckets are not proven equal
    keep_decoded: bool = True  # decoded rows equal prefilled ones (buckets are proven equal), so they are kept
    batch_rows: int = 16  # rows of one batched decode step, proposals included
    mixed_rows: int = 0  # of a forward with decode steps and the next rows of a prompt; 0: the two take turns
    # Rows of prompts go along with several decode steps of one launch, and prompts may join a launch. It needs mixed
    # forwards, and no draft. Several prompts share a forward, with positional state if `commits_per_segment`.
    mixed_launches: bool = False
    # Prefills of more rows run on the prompt lane while decode steps run. 0: there is no such lane.
    prompt_lane_min_rows: int = 0
    store: bool = False  # blocks are kept in host memory or on disk
    min_tokens: int = 0  # shorter sequences are not kept beyond the device
    stateful: bool = False  # the model has positional state, which blocks do not hold: a hit needs a checkpoint as well
    commits_per_segment: bool = False  # a forward with decode steps may commit any number of a prompt's rows
    state_checkpoints: int = 0  # checkpoints that the device keeps, besides the state of each slot
    state_tokens: int = 0  # bytes of a checkpoint, counted in tokens whose rows take as many
    checkpoint_interval: int = 0  # tokens between two checkpoints that scope `full` keeps; 0: only where it ends
    # Scope `full` keeps a checkpoint for other sessions at the last boundary up to this token. 0: none.
    shared_checkpoint_limit: int = 0
    max_proposals: int = 0  # of the draft, in a decode step; 0: there is no draft
    max_copied: int = 0  # tokens of earlier text that a decode step proposes; 0: no text is searched
    max_branch: int = 0  # of these, tokens of a branch of the chain; 0: the model verifies chains only
    tree: int = 0  # nodes of a proposed tree; 0: proposals are chains
    no_trees: bool = False  # trees were asked for, but the model cannot verify them
    residency: Resolved = field(factory=Resolved)  # what becomes of the models' weights between requests
    scorer_max_tokens: int = 0  # tokens of a prompt that the prompt scorer takes at most; 0: there is no prompt scorer
    scorer_lane: LaneId = MAIN  # of the device that scores prompts: the target's, or another one
    # Nanoseconds from one token of an answer to the next one that are acceptable while prompts wait; 0: prompts get no
    # more of the device than steps leave them.
    latency_target_ns: int = 0
    # Most chunks of one prefill: more than 1 where shards compute side by side, or on the prompt lane.
    chunks_per_prefill: int = 1
    experts: int = 0  # of all layers, that host memory has; 0: all experts are where their layers are
    expert_slots: int = 0  # experts that the device has at once
    rates: Rates = field(factory=Rates)  # as measured at start

    @property
    def serving_slots(self) -> int:
        """The requests that are served at once. Ended ones whose rows are being saved are not counted."""
        return self.slots - self.spare_slots

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for impossible settings. They also come out of traces, which are hostile input."""
        positive = (
            self.serving_slots,
            self.max_context,
            self.chunk,
            self.chunks_per_prefill,
            self.block_size,
            self.batch_rows,
            self.page,
        )
        natural = (
            *(
                self.max_queue,
                self.spare_slots,
                self.min_tokens,
                self.checkpoint_interval,
                self.shared_checkpoint_limit,
                self.max_proposals,
                self.tree,
                self.max_copied,
                self.max_branch,
            ),
            *(
                self.mixed_rows,
                self.prompt_lane_min_rows,
                self.pages,
                self.scorer_max_tokens,
                self.scorer_lane,
                self.state_checkpoints,
                self.state_tokens,
                self.latency_target_ns,
            ),
            *(self.expert_slots, self.experts - self.expert_slots, MOST_EXPERTS - self.experts),
        )
        limit = MOST_SLOTS - max(self.slots, self.state_checkpoints)
        if self.shares_pages and self.stateful:
            raise ValueError("rows before a state that was lost are computed again: no two slots may share them")
        if self.prompt_lane_min_rows and (self.stateful or self.max_proposals):
            raise ValueError("the prompt lane cannot be used with positional state or with a draft")
        if self.mixed_launches and (not self.mixed_rows or self.max_proposals):
            raise ValueError("a prompt goes along with several steps only in mixed forwards, and without a draft")
        if self.chunks_per_prefill > 1 and self.chunk <= self.prompt_lane_min_rows:
            raise ValueError(
                f"a prefill of several chunks needs chunks that go to the prompt lane; {self.chunk} rows are too few"
            )
        if 0 < self.pages * self.page < self.max_context:
            raise ValueError(f"{self.pages} pages do not hold the longest sequence, {self.max_context} rows")
        if min(positive) < 1 or min(natural) < 0 or self.chunk % self.block_size or limit < 0:
            raise ValueError(f"impossible settings: {self}")


@frozen
class DecisionContext:
    """The settings and rates that decisions rest on. Every transition function takes it."""

    settings: Settings = field(factory=Settings)
    rates: Rates = field(factory=Rates)  # as they have been learned up to now
