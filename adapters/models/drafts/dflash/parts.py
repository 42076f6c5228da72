"""The parts that DFlash 2 and DSpark add to a DFlash draft: fields of config.json, and the tensors that go with them.

DFlash 2 has a short convolution around attention and feed-forward of each layer, and a selector that chooses a path
through the likeliest tokens of all places. DSpark has a Markov head: logits of a place are corrected by the token
before it. Its confidence head says how likely each proposal is right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from attrs import frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import read_positive

MOST_TAPS = 8  # published drafts have 2
MOST_CANDIDATES = 128  # published drafts have 16
MOST_RANK = 4096  # published drafts have 256
MARKOV_KINDS = ("vanilla", "gated", "rnn")
MarkovKind: TypeAlias = Literal["vanilla", "gated", "rnn"]
Sizes: TypeAlias = Mapping[str, tuple[int, ...]]


@frozen
class ConvolutionShape:
    """A grouped convolution over the rows of a block. taps: rows, from a row's own backwards. group: columns that share
    the part of a factor that depends on the row.
    """

    taps: int
    group: int

    def list_tensors(self, hidden: int) -> Sizes:
        return {
            "base_kernel": (2, self.taps, hidden),
            "kernel_projection.weight": (self.count_factors(hidden), hidden),
        }

    def count_factors(self, hidden: int) -> int:
        """Return how many factors are projected from a row: for both sides, each tap and each group."""
        return 2 * self.taps * (hidden // self.group)


@frozen
class SelectorShape:
    """A selector. vocab: of the target. candidates: tokens of a place that it chooses from."""

    vocab: int
    rank: int
    candidates: int

    def list_tensors(self, hidden: int) -> Sizes:
        return {
            "candidate_selector.hidden_projection.weight": (self.rank, hidden),
            "candidate_selector.predecessor_codebook": (self.vocab, self.rank),
            "candidate_selector.successor_codebook": (self.vocab, self.rank),
        }


@frozen
class MarkovShape:
    """A Markov head. vocab: of the target. has_confidence: a confidence head comes with it. confidence_sees_token: this
    head also reads the embedding of the token before.
    """

    vocab: int
    kind: MarkovKind
    rank: int
    has_confidence: bool = False
    confidence_sees_token: bool = True

    @property
    def inner(self) -> tuple[str, int, int] | None:
        """The name, the outputs and the embeddings among the inputs of the head's own projection, if it has one."""
        return {"vanilla": None, "gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}[self.kind]

    def list_tensors(self, hidden: int) -> Sizes:
        rank = self.rank
        tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(tables, (self.vocab, rank))
        if self.inner is not None:
            name, outputs, embeddings = self.inner
            sizes[f"markov_head.{name}.weight"] = (outputs * rank, embeddings * rank + hidden)
            sizes[f"markov_head.{name}.bias"] = (outputs * rank,)
        if self.has_confidence:
            width = hidden + rank * self.confidence_sees_token
            sizes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return sizes


@frozen
class LogitScale:
    """A change of the head's logits. They are multiplied, then bounded by `cap * tanh(x / cap)` if there is a cap."""

    multiplier: float = 1.0
    cap: float = 0.0

    @property
    def is_plain(self) -> bool:
        """True if logits stay as they are."""
        return self.multiplier == 1 and not self.cap

    def apply(self, logits: Tensor) -> None:
        """Change logits in place."""
        if self.multiplier != 1:
            logits.mul_(self.multiplier)
        if self.cap:
            logits.div_(self.cap).tanh_().mul_(self.cap)


PLAIN_LOGITS = LogitScale()


@frozen
class DraftParts:
    """The parts that a draft has besides the layers of DFlash. Plain DFlash has none of them.

    from_anchor: the block's first row gives the first proposal, so that a block of B rows gives B proposals.
    embedding_scale: the rows of the embedding are multiplied with it.
    """

    convolution: ConvolutionShape | None = None
    selector: SelectorShape | None = None
    markov: MarkovShape | None = None
    from_anchor: bool = False
    embedding_scale: float = 1.0
    scale: LogitScale = PLAIN_LOGITS

    @property
    def name(self) -> str:
        return "DFlash 2" if self.selector is not None else "DSpark" if self.markov is not None else "DFlash"

    @property
    def is_corrected(self) -> bool:
        """Does a proposal depend on the one before it?"""
        return self.selector is not None or self.markov is not None

    def list_tensors(self, hidden: int) -> Sizes:
        """Return the names and shapes of the tensors that are outside of layers."""
        part = self.selector or self.markov
        return {} if part is None else part.list_tensors(hidden)

    def list_layer_tensors(self, hidden: int) -> Sizes:
        """Return the names within a layer, and the shapes, of what layers have besides those of DFlash."""
        if self.convolution is None:
            return {}
        sizes = self.convolution.list_tensors(hidden)
        return {f"{place}_conv.{name}": size for place in ("attention", "mlp") for name, size in sizes.items()}


PLAIN_PARTS = DraftParts()


def read_parts(fields: Mapping[str, Any], names: Collection[str], hidden: int, vocab: int) -> DraftParts:
    """Return the parts that the tensors' names show, with their sizes from config.json. Raises CheckpointError.

    fields: those of config.json and of its `dflash_config`. names: of all tensors. hidden, vocab: of the target.
    """
    has_selector = any(name.startswith("candidate_selector.") for name in names)
    has_convolution = any("_conv." in name for name in names)
    has_markov = any(name.startswith("markov_head.") for name in names)
    has_confidence = any(name.startswith("confidence_head.") for name in names)
    _check_architecture(fields, has_selector=has_selector, has_markov=has_markov)
    if has_selector != has_convolution:
        present, absent = ("candidate_selector.*", "*_conv.*")[:: 1 if has_selector else -1]
        raise CheckpointError(f"tensors {present} are there without {absent}; accepted: DFlash 2, which has both")
    if has_selector and has_markov:
        raise CheckpointError("tensors candidate_selector.* and markov_head.* are both there; accepted: one of them")
    if has_confidence and not has_markov:
        raise CheckpointError("tensors confidence_head.* are there without markov_head.*; accepted: DSpark with both")
    return DraftParts(
        convolution=_read_convolution(fields, hidden) if has_selector else None,
        selector=_read_selector(fields, vocab) if has_selector else None,
        markov=_read_markov(fields, vocab, has_confidence=has_confidence) if has_markov else None,
        from_anchor=has_markov and read_switch(fields, "sample_from_anchor", default=True),
        embedding_scale=_read_factor(fields, "input_embedding_scale"),
        scale=LogitScale(_read_factor(fields, "output_multiplier"), _read_cap(fields)),
    )


def _check_architecture(fields: Mapping[str, Any], *, has_selector: bool, has_markov: bool) -> None:
    """Raise CheckpointError if config.json names another kind of draft than the tensors show."""
    named = str(fields.get("architectures"))
    if "DFlash2" in named and not has_selector:
        raise CheckpointError(f"config.json: architectures {named[:80]}, but tensors candidate_selector.* are missing")
    if "DSpark" in named and not has_markov:
        raise CheckpointError(f"config.json: architectures {named[:80]}, but tensors markov_head.* are missing")


def _read_convolution(fields: Mapping[str, Any], hidden: int) -> ConvolutionShape:
    group = read_integer(fields, "conv_group_size", 1, hidden)
    if hidden % group:
        raise CheckpointError(f"config.json: conv_group_size {group} does not divide hidden_size {hidden}")
    return ConvolutionShape(read_integer(fields, "conv_kernel_size", 1, MOST_TAPS), group)


def _read_selector(fields: Mapping[str, Any], vocab: int) -> SelectorShape:
    candidates = read_integer(fields, "selector_top_k", 1, MOST_CANDIDATES)
    return SelectorShape(vocab, read_integer(fields, "selector_rank", 1, MOST_RANK), candidates)


def _read_markov(fields: Mapping[str, Any], vocab: int, *, has_confidence: bool) -> MarkovShape:
    kind = fields.get("markov_head_type", "vanilla")
    if kind not in MARKOV_KINDS:
        accepted = ", ".join(map(repr, MARKOV_KINDS))
        raise CheckpointError(f"config.json: markov_head_type {describe_value(kind)}; accepted: {accepted}")
    return MarkovShape(
        vocab,
        kind,
        read_integer(fields, "markov_rank", 1, MOST_RANK),
        has_confidence=has_confidence,
        confidence_sees_token=read_switch(fields, "confidence_head_with_markov", default=True),
    )


def _read_factor(fields: Mapping[str, Any], name: str) -> float:
    return read_positive(fields[name], name) if fields.get(name) is not None else 1.0


def _read_cap(fields: Mapping[str, Any]) -> float:
    """Return the bound of logits. Files that have none leave it out, or have 0."""
    name = "final_logit_softcapping"
    return read_positive(fields[name], name) if fields.get(name) else 0.0


def read_switch(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a flag of config.json, or the default if it has none. Raises CheckpointError."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} {describe_value(value)} is not true or false")
    return value


def read_integer(fields: Mapping[str, Any], name: str, lowest: int, highest: int) -> int:
    """Return an integer of config.json. Raises CheckpointError, also if it is missing."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise CheckpointError(f"config.json: {name} {repr(value)[:40]} is not an integer in {lowest}..{highest}")
    return value
