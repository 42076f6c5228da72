"""The loss of the draft and its training data. It learns to predict the target's picks at every slot of a block.

The target is frozen and runs in the same step. Most of the text is code that the target has generated, because its
picks differ from real code too often. The rest are the tasks, whose answers the target nearly always gives itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from random import Random

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from training.batches import Batch, Batches, BatchShape, row_random
from training.draft_generate import generate
from training.draft_model import (
    BlockSlots,
    DraftNetwork,
    Step,
    draft_step,
    embed_blocks,
    head,
    read_target,
    target_step,
)
from training.model import Qwen3, Trainable
from training.tasks import split_room

LEAST_WEIGHT = 0.5
"""Tokens of less weight belong to no answer, but to prompts, and to code in which facts are hidden."""

DECAY = 7.0
STRICTNESS = 1.0
FLOOR = 0.3
HARD = 0.35
OVERLAP = 0.4
WARMTH = 0.8
"""The temperature at which the draft learns the target's distribution: that of exams and benchmarks."""

SPOKEN = 0.7
"""The share of a batch's rows that the target generated."""


class DraftLoss(Trainable):
    """The draft with a loss over random blocks of every size. The target is no part of its parameters."""

    def __init__(self, draft: DraftNetwork, target: Qwen3, blocks: int) -> None:
        """blocks: the room of a row, in blocks of the largest size."""
        super().__init__()
        self.draft = draft
        self._target = (target,)
        self._blocks = blocks
        self._losses: SlotLosses = slot_losses
        self._target_step: Step = target_step
        self._draft_step: Step = draft_step

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean loss in nats a slot, by weight, and over the sizes of blocks. tokens, weights: [rows, length + 1]."""
        (target,) = self._target
        tokens, weights = tokens.long(), weights.float()
        rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        with torch.no_grad():
            hidden, aux_layers = read_target(target, tokens[:, :-1], self.draft.geometry.aux_layers, self._target_step)
            room = count_row_blocks(self._blocks, hidden.shape[1])
            parts = {
                size: choose_anchors(weights, count, size)
                for size, count in list_block_sizes(self.draft.geometry.block, room)
            }
            slots = BlockSlots.of({size: anchors for size, (anchors, _, _) in parts.items()})
            said = embed_blocks(target, tokens, slots).float()
            positions = torch.cat([positions.flatten(1) for _, positions, _ in parts.values()], 1)
            with torch.autocast(tokens.device.type, enabled=False):
                truth = head(target, hidden[rows, positions - 1])
        out = self.draft(self.draft.context(aux_layers), slots, said, self._draft_step)
        rest = out[(slots.positions != slots.anchors)].view(*positions.shape, -1)
        found = self._losses(target.logits(rest), truth, tokens.gather(1, positions))
        means, done = [], 0
        for _, _, counted in parts.values():
            upto = done + counted.shape[1] * counted.shape[2]
            losses, suits, reaches = (value[:, done:upto].view(counted.shape) for value in found)
            means.append(average_loss(losses, suits, reaches, counted))
            done = upto
        return torch.stack(means).mean()

    def compile_parts(self) -> None:
        """Neither target nor draft themselves, which are examined between stages, with other shapes."""
        self._losses = torch.compile(slot_losses, dynamic=False)
        self._target_step = torch.compile(target_step, dynamic=False)
        self._draft_step = torch.compile(draft_step, dynamic=False)


def count_row_blocks(most: int, length: int) -> int:
    """Return the number of blocks in a row: one for eight tokens, at most `most`."""
    return min(most, length // 8)


def list_block_sizes(block: int, room: int) -> list[tuple[int, int]]:
    """Return sizes of blocks and their numbers, which together take the room of `room` blocks of `block` slots.

    The largest blocks take half of the room, and the next two sizes a quarter each. The server uses these where fewer
    proposals are worth checking.
    """
    return [(block, room // 2), (block // 2, room // 2), (block // 4, room)]


def choose_anchors(weights: Tensor, count: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `count` random anchors [rows, count] for each row, from its answers. weights: [rows, length].

    Also return the positions of the other slots' labels, and whether they count, both [rows, count, slots - 1]. Anchors
    are drawn with repetition, so each row counts the same, however short its answers are. An anchor and its labels are
    in one answer: an anchor is a pick of the target, and a user's text is never drafted.
    """
    length = weights.shape[1]
    said = weights > LEAST_WEIGHT
    odds = weights[:, :-1] * said[:, :-1] * said[:, 1:]
    anchors = torch.multinomial(odds + 1e-6, count, replacement=True)
    positions = anchors.unsqueeze(-1) + torch.arange(1, slots, device=weights.device)
    inside = positions < length
    positions = positions.clamp(max=length - 1)
    counted = said.gather(1, positions.flatten(1)).view(positions.shape) & inside
    counted = counted & said.gather(1, anchors).unsqueeze(-1)
    return anchors, positions, counted.cumprod(-1) > 0


SlotLosses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def slot_losses(scores: Tensor, truth: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the draft's logits `scores` with the target's, `truth`. Both are [rows, slots, vocabulary].

    truth: in float32, computed with all tokens before the slot. labels: [rows, slots], the tokens of the text. The loss
    of a slot has three parts:

    * the cross-entropy to the target's distribution at WARMTH, for sampling;
    * the cross-entropy to the target's likeliest token, for greedy decoding;
    * minus the logarithm of the overlap of both distributions. That is how often tokens that are picked with the same
      noise agree.

    Returns the losses, the odds of the label against the target's likeliest token, and the draft's probability of the
    label, all [rows, slots].
    """
    scores = scores.float()
    truth_log, mine_log = truth.log_softmax(-1), scores.log_softmax(-1)
    truth_warm, mine_warm = (truth / WARMTH).softmax(-1), (scores / WARMTH).log_softmax(-1)
    likeliest = truth_log.amax(-1)
    of_label = labels.unsqueeze(-1)
    suits = (STRICTNESS * (truth_log.gather(-1, of_label).squeeze(-1) - likeliest)).exp()
    reaches = mine_log.gather(-1, of_label).squeeze(-1).detach().exp()
    soft = -(truth_warm * mine_warm).sum(-1)
    hard = -mine_log.gather(-1, truth.argmax(-1, keepdim=True)).squeeze(-1)
    shared = torch.minimum(truth_warm, mine_warm.exp()).sum(-1).clamp_min(1e-6)
    return HARD * hard + (1 - HARD - OVERLAP) * soft - OVERLAP * shared.log(), suits, reaches


def average_loss(losses: Tensor, suits: Tensor, reaches: Tensor, counted: Tensor) -> Tensor:
    """Return the weighted mean loss of blocks [rows, blocks, slots]. counted: which slots have a loss.

    The weight of a slot is exp(-slot / DECAY) times two factors. The first one is how well the earlier labels suit the
    target, because a slot after a wrong token is never used. The second one depends on how likely the draft proposes
    the earlier labels, so that it learns the first slots first.
    """
    slots = torch.arange(losses.shape[-1], device=losses.device)
    weights = (
        counted
        * torch.exp(-slots / DECAY)
        * multiply_earlier(suits)
        * (FLOOR + (1 - FLOOR) * multiply_earlier(reaches))
    )
    return (losses * weights).sum() / weights.sum().clamp_min(1e-6)


def multiply_earlier(odds: Tensor) -> Tensor:
    """Return for each slot the product of the odds of the slots before it, along the last axis."""
    return functional.pad(odds[..., :-1], (1, 0), value=1.0).cumprod(-1)


# Text that the target generates


@frozen
class Speech:
    """The continuations that the target generates: `rounds` times `rows` of them.

    Each has `answer` tokens after a prompt of code with `least` to `most` tokens. The rows take the temperatures in
    turn; 0 is greedy.
    """

    rows: int
    rounds: int
    least: int
    most: int
    answer: int
    temperatures: tuple[float, ...] = (0.0, WARMTH, WARMTH)


@frozen(eq=False)
class Pool:
    """Text that the target generated: tokens int16 [rows, length]. Row i has `answer` of them from `starts[i]` on."""

    tokens: np.ndarray
    starts: np.ndarray
    answer: int

    def batch(self, rng: Random, rows: int) -> Batch:
        """Draw random rows: tokens int16 and weights float16, each [rows, length]. Generated tokens have weight 1."""
        picked = rng.sample(range(len(self.tokens)), rows)
        starts = self.starts[picked][:, None]
        positions = np.arange(self.tokens.shape[1])
        weights = (starts <= positions) & (positions < starts + self.answer)
        return torch.from_numpy(self.tokens[picked]), torch.from_numpy(weights.astype(np.float16))


def generate_pool(
    target: Qwen3, batches: Batches, speech: Speech, length: int, *, seconds: float, workers: int
) -> Pool:
    """Let the target continue code, for at most `seconds` but at least one round.

    batches: windows of at least `speech.most` tokens, a whole number of them for each round. length: of the pool's
    rows, at least `speech.most + speech.answer`.
    """
    device = target.cos.device
    generator = torch.Generator(device).manual_seed(batches.seed)
    temperatures = torch.tensor(speech.temperatures, device=device).repeat(speech.rows)[: speech.rows, None]

    def pick(logits: Tensor, _positions: Tensor) -> Tensor:
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp_min_(1e-30).log().neg()
        return (logits + temperatures * noise).argmax(-1)

    began, tokens, starts = time.monotonic(), [], []
    parts = speech.rows // batches.shape.rows
    loaded = batches.load(range(speech.rounds * parts), workers)
    for step in range(speech.rounds):
        rng = row_random(batches.seed, step, -1)
        sizes = [split_room(rng, speech.most, speech.least) for _ in range(speech.rows)]
        windows = (window for part, _ in islice(loaded, parts) for window in part.tolist())
        prompts = [window[:size] for window, size in zip(windows, sizes, strict=True)]
        said = generate(target, prompts, speech.answer, pick).to(torch.int16).cpu().numpy()
        tokens.append(np.pad(said, ((0, 0), (0, length - said.shape[1]))))
        starts += sizes
        if time.monotonic() - began > seconds:
            break
    pool = Pool(np.concatenate(tokens), np.array(starts), speech.answer)
    print(
        f"the target said {len(pool.tokens) * speech.answer / 1e6:.1f}M tokens in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return pool


@frozen(kw_only=True)
class Mixed(Batches):
    """Batches whose last `spoken` rows are text that the target generated."""

    pool: Pool
    spoken: int

    def __getitem__(self, step: int) -> Batch:
        tokens, weights = super().__getitem__(step)
        said, where = self.pool.batch(row_random(self.seed, step, -1), self.spoken)
        return torch.cat((tokens, said)), torch.cat((weights, where))


def mix_with_pool(batches: Batches, pool: Pool) -> Mixed:
    """Return batches of which the share SPOKEN comes from the pool."""
    spoken = round(SPOKEN * batches.shape.rows)
    shape = BatchShape(batches.shape.rows - spoken, batches.shape.length)
    return Mixed(
        tokenizer=batches.tokenizer,
        source=batches.source,
        mixture=batches.mixture,
        shape=shape,
        seed=batches.seed,
        whole=batches.whole,
        mingled=batches.mingled,
        pool=pool,
        spoken=spoken,
    )
