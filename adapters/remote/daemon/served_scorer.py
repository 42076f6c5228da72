"""A prompt scorer in a daemon: it gets the tokens of a prompt, and returns their scores when all layers are done."""

from __future__ import annotations

import time
from typing import ClassVar

import torch
from attrs import define, field

from adapters.models.decoder.scorer import TAIL, Scorer, Scoring
from adapters.remote.daemon.answer_handlers import OpAnswer, Ops
from adapters.remote.protocol.draft_messages import DraftBytes, DraftMoved, SendAway
from adapters.remote.protocol.messages import Described, Nothing, Op, Unacceptable
from adapters.remote.protocol.payload_tensors import TensorBytes, describe_tensors
from adapters.remote.protocol.scorer_messages import (
    MOST_SCORINGS,
    DropScoring,
    PromptAdvanced,
    ScorePrompt,
    ScorerReady,
)


@define(eq=False)
class ServedScorer:
    """A prompt scorer that a daemon serves. One prompt advances by a chunk with each request."""

    scorer: Scorer
    _underway: dict[int, Scoring] = field(init=False, factory=dict)
    ops: ClassVar[Ops]

    @property
    def device(self) -> torch.device:
        return self.scorer.device

    def describe_loaded(self, *, shared: bool) -> ScorerReady:
        return ScorerReady(self.scorer.chunk, self._memory(), shared)

    def close(self) -> None:
        self._underway.clear()
        self.scorer.weights.release()

    def _memory(self) -> DraftBytes:
        buffers = sum(scoring.nbytes for scoring in self._underway.values())
        return self.scorer.weights.weights_bytes, self.scorer.weights.host_bytes, 0, buffers

    def score(self, asked: ScorePrompt, given: TensorBytes) -> OpAnswer:
        """Score a prompt further. An error forgets the prompt."""
        began = time.perf_counter_ns()
        scoring = self._underway.pop(asked.number, None)
        if given.tensors:
            scoring = self._begin(given)
        if scoring is None:
            raise Unacceptable(f"nothing of prompt {asked.number} was scored before")
        scoring.advance()
        found = dict[str, torch.Tensor]()
        held = scoring.nbytes
        if scoring.complete:
            found = {"scores": torch.tensor(scoring.scores())}
            held = 0
        else:
            self._underway[asked.number] = scoring
        return OpAnswer(PromptAdvanced(time.perf_counter_ns() - began, held, describe_tensors(found)), found)

    def _begin(self, given: TensorBytes) -> Scoring:
        [tokens, *others] = given.tensors
        count = tokens.shape[0] if len(tokens.shape) == 1 else 0
        vocab = self.scorer.config.vocab_size
        accepted = Described("tokens", "I32", (count,))
        if others or tokens != accepted or not TAIL <= count <= self.scorer.limit:
            raise Unacceptable(f"a prompt is {TAIL} to {self.scorer.limit} tokens")
        if len(self._underway) == MOST_SCORINGS:
            raise Unacceptable(f"{MOST_SCORINGS} prompts are on their way already")
        if self.scorer.weights.loaded is None:
            raise Unacceptable("the drafter's weights were not fetched")
        ids: tuple[int, ...] = tuple(given.views()["tokens"].tolist())
        if min(ids) < 0 or max(ids) >= vocab:
            raise Unacceptable(f"a token that is not one of {vocab}")
        return self.scorer.begin(ids)

    def drop(self, asked: DropScoring, _: TensorBytes) -> OpAnswer:
        self._underway.pop(asked.number, None)
        return OpAnswer(Nothing())

    def fetch(self, _: Nothing, __: TensorBytes) -> OpAnswer:
        moved = self.scorer.weights.load_back()
        return OpAnswer(DraftMoved(moved, self._memory()))

    def send_away(self, asked: SendAway, _: TensorBytes) -> OpAnswer:
        held = self.scorer.weights.weights_bytes
        self._underway.clear()
        if asked.keep:
            self.scorer.weights.offload()
        else:
            self.scorer.weights.release()
        return OpAnswer(DraftMoved(held, self._memory()))


ServedScorer.ops = {
    Op.SCORE: (ScorePrompt, ServedScorer.score),
    Op.DROP_SCORING: (DropScoring, ServedScorer.drop),
    Op.FETCH_DRAFT: (Nothing, ServedScorer.fetch),
    Op.SEND_DRAFT_AWAY: (SendAway, ServedScorer.send_away),
}
