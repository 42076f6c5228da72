"""Batches: windows filled with documents of one kind each, made by worker processes, the same for the same step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from random import Random

import numpy as np
import torch
from attrs import field, frozen
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.chat_format import CONTROLS, PAD, Document
from training.tasks import CODE_WEIGHT, Task, code, split_room
from training.tokenizer import encode
from training.words import Source

PAD_ID = CONTROLS.index(PAD)
ATTEMPTS = 3
SHORTEST = 96
Batch = tuple[Tensor, Tensor]
Mixture = Mapping[Task, float]


@frozen
class BatchShape:
    """`rows` windows of `length` predicted tokens."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@frozen
class Batches(Dataset[Batch]):
    """Item `step`: tokens int16 [rows, length + 1] and weights float16 [rows, length + 1], weight 0 for no loss.

    An item depends on `seed` and `step` alone, so any number of workers gives the same training.
    """

    tokenizer: Tokenizer
    source: Source
    mixture: Mixture
    shape: BatchShape
    seed: int
    whole: float = 0.3
    """How many documents are given all the room that is left; the others are of every size."""

    mingled: bool = False
    """A window's documents are of any tasks, not of one: for windows of which a batch has few."""

    _tasks: Sequence[Task] = field(init=False)
    _odds: Sequence[float] = field(init=False)

    @_tasks.default
    def _list_tasks(self) -> Sequence[Task]:
        return tuple(self.mixture)

    @_odds.default
    def _list_odds(self) -> Sequence[float]:
        return tuple(self.mixture.values())

    def __getitem__(self, step: int) -> Batch:
        rows = [self.row(row_random(self.seed, step, row)) for row in range(self.shape.rows)]
        tokens, weights = zip(*rows, strict=True)
        return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(weights))

    def row(self, rng: Random) -> tuple[np.ndarray, np.ndarray]:
        """One window of documents of one task, or mingled; what no further document fits into is filled with code."""
        (task,) = rng.choices(self._tasks, self._odds)
        length = self.shape.length + 1
        tokens: list[int] = []
        weights: list[float] = []
        misses = 0
        while len(tokens) < length - SHORTEST // 4 and misses < ATTEMPTS:
            left = length - len(tokens)
            room = left if task is code or rng.random() < self.whole else split_room(rng, left, SHORTEST)
            ids, gains = flatten(self.tokenizer, task(rng, self.source, room))
            if len(ids) > left and task is not code:
                misses += 1
                continue
            tokens += ids
            weights += gains
            if self.mingled:
                (task,) = rng.choices(self._tasks, self._odds)
        if len(tokens) < length:
            ids, gains = flatten(self.tokenizer, code(rng, self.source, length - len(tokens)))
            tokens += ids
            weights += [CODE_WEIGHT] * len(gains)
        missing = max(0, length - len(tokens))
        row = np.array([*tokens[:length], *[PAD_ID] * missing], dtype=np.int16)
        return row, np.array([*weights[:length], *[0.0] * missing], dtype=np.float16)

    def load(self, steps: range, workers: int) -> Iterator[Batch]:
        """The batches of these steps, in order, made ahead by `workers` processes (0: here, when asked for)."""
        return load_batches(self, steps, workers)


@frozen
class InTurn(Dataset[Batch]):
    """Batches of several shapes: item `step` is that of the part whose turn it is."""

    parts: Sequence[Batches]

    def __getitem__(self, step: int) -> Batch:
        return self.parts[step % len(self.parts)][step]

    def load(self, steps: range, workers: int) -> Iterator[Batch]:
        return load_batches(self, steps, workers)


def load_batches(batches: Dataset[Batch], steps: range, workers: int) -> Iterator[Batch]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=list(steps),
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)


def row_random(seed: int, step: int, row: int) -> Random:
    name = f"{seed}/{step}/{row}".encode()
    return Random(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big"))


def flatten(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[float]]:
    """Token ids and their weights. Pieces are encoded apart: an answer begins at a token of its own."""
    texts = iter(encode(tokenizer, [piece.content for piece in document if isinstance(piece.content, str)]))
    tokens: list[int] = []
    weights: list[float] = []
    for piece in document:
        ids = next(texts) if isinstance(piece.content, str) else piece.content
        tokens += ids
        weights += [piece.weight] * len(ids)
    return tokens, weights
