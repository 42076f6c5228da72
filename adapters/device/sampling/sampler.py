"""Picks tokens from logits, exactly and reproducibly.

The order is: logit bias, repetition penalty, presence and frequency penalties, the grammar's mask, temperature, top-k,
top-p, min-p, then the largest of logit + Gumbel noise (`noise.py`). Greedy picks the largest logit, and the lowest
token id of equal ones. A pick depends on its own row only, and is the same on every device, because every comparison
and every sum has one right answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.device.sampling.grammar_mask import Mask, Matching, build_forbidden_mask
from adapters.device.sampling.side_stream import side_stream
from adapters.models.kernels.factory import build_sampling
from adapters.models.kernels.interfaces.sampling_interface import build_penalties
from effects.decode import Logprob
from effects.ids import Tokens
from effects.job import Sampling


class Sampler:
    """The settings by which one request's tokens are picked, and what its penalties have seen so far.

    prompt: every token before the answer, restored ones included. vocab: V. matching: the progress through its grammar,
    if it has one. Raises ValueError for a bias on a token that the model does not have.

    plain: the model's logits are used as they are, except for a grammar's mask. cheap: picking one more row costs
    hardly anything. native: picks in one call of the compiled library, if that serves. draft_samplings: the settings
    with which a draft guesses the picks, by its share of the noise.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Tokens,
        vocab: int,
        device: torch.device | str = "cpu",
        matching: Matching | None = None,
    ) -> None:
        self.sampling = sampling
        self.matching = matching
        self._device = torch.device(device)
        kernels = build_sampling(self._device)
        self.penalties = build_penalties(kernels, sampling, prompt, vocab)
        self.plain = self.penalties is None
        self.cheap = self.plain and matching is None and sampling.logprobs < 0
        self.native = kernels.open_picker()
        self.draft_samplings: dict[float, Sampling] = {}

    @property
    def device(self) -> torch.device:
        """The device of the logits that it is used on."""
        return self._device

    @property
    def picks_independently(self) -> bool:
        """Do earlier picks influence later ones through the model only? Grammars and penalties do otherwise."""
        return self.matching is None and (self.penalties is None or not self.penalties.remembers)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer."""
        if self.penalties is not None:
            self.penalties.append(tokens)
        if self.matching is not None:
            self.matching.append(tokens)


@frozen(eq=False)
class Draw:
    """A row of logits to pick from: the sampler of its request, and the position of the token that is picked.

    drafted: the proposals at the end of the row's prefix, which the sampler does not know as part of the answer.
    """

    sampler: Sampler
    position: int
    drafted: Tokens = ()


@frozen
class TokenPick:
    """A token that was picked."""

    token: int
    logprob: Logprob | None = None  # when the request asked for them


@frozen
class NotFinite:
    """The row's logits hold NaN or infinity; nothing was picked."""

    detail: str

    @classmethod
    def at(cls, position: int) -> NotFinite:
        """Return the failure for the token at this position."""
        return cls(f"the logits for position {position} are not finite")


@frozen
class DeadEnd:
    """The request's grammar lets no token follow; nothing was picked."""

    detail: str


PickResult: TypeAlias = TokenPick | NotFinite | DeadEnd

NOTHING: list[float] = []  # the weights of a row whose log-probabilities were not asked for
TOGETHER = 4  # rows that a host picks from at once, where their tokens may be asked for one after the other


def make_picker(logits: Tensor, rows: Sequence[Draw], *, every: bool) -> Callable[[int], PickResult]:
    """Return a function that returns the pick of a row. every: all rows will be asked for.

    Otherwise a host picks when a row is asked for, and also at a few rows behind it if that is cheap. A GPU picks at
    all rows at once.
    """
    if every or logits.is_cuda:
        return pick(logits, rows).__getitem__
    found: dict[int, PickResult] = {}

    def pick_row(row: int) -> PickResult:
        if row not in found:
            stop = row + 1
            most = min(row + TOGETHER, len(rows)) if rows[row].sampler.cheap else 0
            while stop < most and rows[stop].sampler.cheap:
                stop += 1
            found.update(enumerate(pick(logits[row:] if row else logits, rows[row:stop]), row))
        return found[row]

    return pick_row


@define(eq=False)
class LaunchedPicks:
    """Picks that were launched: the tokens are on the device, int64 `[R]`, and the host gets all results in one copy.

    ends: for rows where the grammar allows no token, why. wanted: rows whose log-probabilities are asked for, with
    `most` alternatives.
    """

    rows: Sequence[Draw]
    tokens: Tensor
    ends: Mapping[int, str]
    wanted: Sequence[int]
    most: int
    _host_results: Tensor
    _arrived: torch.cuda.Event | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Start the copy to the host on a stream of its own. Neither the host nor the device waits for it."""
        if self._host_results.is_cuda:
            with side_stream(self._host_results) as stream:
                there = torch.empty(self._host_results.shape, dtype=self._host_results.dtype, pin_memory=True)
                self._host_results = there.copy_(self._host_results, non_blocking=True)
                self._arrived = stream.record_event()

    def read(self) -> list[PickResult]:
        """Return the picks. Waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._host_results.tolist()
        width = 2 + 2 * self.most
        more = iter(values[3 * len(self.rows) :])
        weighed = {index: list(islice(more, width)) for index in self.wanted}
        return [
            _read(row, values[3 * index : 3 * index + 3], weighed.get(index, NOTHING), self.ends.get(index))
            for index, row in enumerate(self.rows)
        ]


def pick(logits: Tensor, rows: Sequence[Draw]) -> list[PickResult]:
    """Pick one token per row, and wait for the device once.

    On a host the compiled library picks, if there is one, with the same bits as `start_picking`.
    """
    native = None if logits.is_cuda else rows[0].sampler.native
    if native is None:
        return start_picking(logits, rows).read()
    raw = logits if logits.shape[0] == len(rows) else logits[: len(rows)]
    masks, ends = _masks(rows)
    wanted = [(row.sampler.sampling, row.position, mask) for row, mask in zip(rows, masks, strict=True)]
    found = native.pick(raw, adjust_logits(raw, rows), wanted)
    return [
        _read(row, picked, weighed, ends.get(index))
        for index, (row, (picked, weighed)) in enumerate(zip(rows, found, strict=True))
    ]


def start_picking(logits: Tensor, rows: Sequence[Draw]) -> LaunchedPicks:
    """Launch the pick of one token per row. logits: float32 `[at least len(rows), V]`. The host does not wait.

    Log-probabilities are natural, of the model's own distribution: before bias, penalties and temperature, and among
    the tokens that a grammar allows, if there is one.
    """
    raw = logits[: len(rows)]
    used = adjust_logits(raw, rows)
    masks, ends = _masks(rows)
    kernels = build_sampling(raw.device)
    tokens, found = kernels.find_extremes(used)
    extremes = found
    out = None
    if any(mask is not None for mask in masks):
        out = build_forbidden_mask(masks, raw.shape[-1], raw.device)
        used = used.masked_fill(out, -math.inf)
        tokens, extremes = kernels.find_extremes(used)
        found[:, 0] = extremes[:, 0]
    draw_some(tokens, found, used, extremes, rows)
    wanted = [index for index, row in enumerate(rows) if row.sampler.sampling.logprobs >= 0]
    if not wanted:
        return LaunchedPicks(rows, tokens, ends, (), 0, found.flatten())
    most = min(max(row.sampler.sampling.logprobs for row in rows), raw.shape[-1])
    raw = raw if out is None else raw.masked_fill(out, -math.inf)
    more = kernels.weigh_tokens(raw, wanted, tokens, most)
    return LaunchedPicks(rows, tokens, ends, wanted, most, torch.cat((found.flatten(), more.flatten())))


def _masks(rows: Sequence[Draw]) -> tuple[list[Mask | None], dict[int, str]]:
    """Return the mask of each row's grammar, if it has one; and for rows where it allows no token, why."""
    masks: list[Mask | None] = []
    ends: dict[int, str] = {}
    for index, row in enumerate(rows):
        matching = row.sampler.matching
        if matching is None:
            masks.append(None)
            continue
        mask = matching.mask(row.drafted)
        if isinstance(mask, str):
            ends[index] = mask
        masks.append(None if isinstance(mask, str) else mask)
    return masks, ends


def adjust_logits(logits: Tensor, rows: Sequence[Draw]) -> Tensor:
    """Return the logits with bias and penalties, float32 `[R, V]`; `logits` itself if no request has any."""
    if all(row.sampler.plain for row in rows):
        return logits
    changes = [(row.sampler.penalties, row.drafted) for row in rows]
    return build_sampling(logits.device).apply_penalties(logits, changes)


def draw_some(tokens: Tensor, found: Tensor, used: Tensor, extremes: Tensor, rows: Sequence[Draw]) -> None:
    """Replace the picks of rows with a temperature by drawn ones: in `tokens`, int64 `[R]`, and in column 0 of `found`.

    used: adjusted logits. extremes: those of `used`. The host does not wait.
    """
    at = [index for index, row in enumerate(rows) if row.sampler.sampling.temperature > 0]
    if not at:
        return
    samplings = [rows[index].sampler.sampling for index in at]
    positions = [rows[index].position for index in at]
    build_sampling(used.device).draw_tokens(used, extremes, at, samplings, positions, tokens=tokens, found=found)


def logprobs_of(logits: Tensor, tokens: Sequence[int], most: int) -> list[Logprob]:
    """Return the log-probability of one given token per row, with the `most` likeliest tokens of that row."""
    given = torch.tensor(tokens, device=logits.device)
    kernels = build_sampling(logits.device)
    weighed = kernels.weigh_tokens(logits, range(len(tokens)), given, min(most, logits.shape[-1])).tolist()
    return [_logprob(row) for row in weighed]


def _logprob(weighed: list[float]) -> Logprob:
    """Return the log-probabilities of a row. weighed: its result of `SamplingKernels.weigh_tokens`.

    Only the host takes the logarithm, so it has the same bits for every device.
    """
    most = len(weighed) // 2 - 1
    ids = weighed[1 : 1 + most]
    values = weighed[1 + most : -1]
    total = weighed[-1]
    log = math.log(total) if total > 0 else math.nan  # the row is not finite
    return weighed[0] - log, tuple(
        (int(id_), value - log) for id_, value in zip(ids, values, strict=True) if value > -math.inf
    )


def _read(row: Draw, picked: list[float], weighed: list[float], end: str | None) -> PickResult:
    """Return the pick of a row. picked: token, lowest and highest logit.

    weighed: what `SamplingKernels.weigh_tokens` found, if asked. end: why the grammar allows no token, if so.
    """
    token, lowest, highest = picked
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return NotFinite.at(row.position)
    if end is not None:
        return DeadEnd(f"the grammar lets nothing follow at position {row.position}: {end}")
    if not weighed:
        return TokenPick(int(token))
    logprob, alternatives = _logprob(weighed)
    return TokenPick(int(token), (logprob, alternatives[: row.sampler.sampling.logprobs]))
