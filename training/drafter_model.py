"""The drafter of prompt compression in training: a small Qwen3 whose last layer learns to attend to what is asked for.

Tokens are scored as in the server: queries of a prompt's last tokens and keys of all, neither rotated, then softmax,
and the largest value over heads and layers. By language alone, some head would learn to find things, but its queries
and keys would depend on positions. So the last layer also has a loss of its own: from the tokens that open an answer,
its best head should attend to the places of the answer's words.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from adapters.models.decoder.scorer import POOL, TAIL
from training.model import DecoderBlock, Geometry, Qwen3, SelfAttention

GEOMETRY = Geometry(hidden=160, inner=384, layers=4, heads=3, kv_heads=1, context=65536)
"""1.7 million parameters. Of the last layer only queries and keys are used, so scoring takes a fifteenth of a target's
work a token, and a ninth of its attention."""

SEARCHING = 5  # tokens before an answer that are to look for it: what closes the question and opens the answer
NEAR = 40  # tokens before an answer that hold its question, which says some of its words, too
ANSWER = 16  # first tokens of an answer that may be found
GRAM = 3  # tokens in a row that are looked for
MOST = 3  # occurrences: what occurs more often says nothing
ASKED = 24  # answers of a row that are looked for
LEAST_WEIGHT = 1.5  # of what is an answer


class ScoringModel(Qwen3):
    """A Qwen3 whose loss also has a part, times `share`, for the attention of the last layer to what is asked for."""

    share = 0.5

    def blocks(self) -> list[DecoderBlock]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderBlock)]

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        inputs = tokens[:, :-1].long()
        x = self.model.embed_tokens(inputs)
        angles = self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]]
        *layers, last = self.blocks()
        for layer in layers:
            x = layer(x, angles)
        starts, goals, counted = find_repeats(tokens.long(), weights.float())
        found = search_loss(last.self_attn, last.input_layernorm(x), starts, goals, counted)
        hidden = self.model.norm(last(x, angles))
        table = self.model.embed_tokens.weight
        said = self._loss(hidden, table, self.unused, tokens[:, 1:].long(), weights[:, 1:])
        return said + self.share * found

    @torch.inference_mode()
    def scores(self, tokens: Tensor) -> Tensor:
        """Return for each of [n] tokens how much the last tokens attend to it.

        This is the score of `adapters.models.decoder.scorer`, but every row attends to all rows before it.
        """
        x = self.model.embed_tokens(tokens[None])
        angles = self.cos[: len(tokens)], self.sin[: len(tokens)]
        rows = torch.arange(len(tokens) - TAIL, len(tokens), device=tokens.device)
        ahead = torch.arange(len(tokens), device=tokens.device) > rows[:, None]
        most = torch.zeros(TAIL, len(tokens), device=tokens.device)
        for layer in self.blocks():
            q, k = project_unrotated(layer.self_attn, layer.input_layernorm(x), rows[None])
            looks = (q[0].float() @ k[0].float().mT * layer.self_attn.dim**-0.5).masked_fill(ahead, -torch.inf)
            most = torch.maximum(most, looks.softmax(-1).amax(0))
            x = layer(x, angles)
        mean = most.mean(0)[None, None]
        return functional.avg_pool1d(mean, POOL, stride=1, padding=POOL // 2, count_include_pad=False).flatten()


def project_unrotated(attention: SelfAttention, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries [batch, heads, r, dim] of rows [batch, r] of x [batch, n, hidden], and keys [batch, 1, n, dim]."""
    batch, length, _ = x.shape
    some = x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
    q = attention.q_norm(attention.q_proj(some).view(batch, -1, attention.heads, attention.dim))
    k = attention.k_norm(attention.k_proj(x).view(batch, length, attention.kv_heads, attention.dim))
    return q.transpose(1, 2), k.transpose(1, 2)


def find_repeats(tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose random answers of each row, and find their words in the text before. tokens, weights: [rows, n + 1].

    Returns the starts of the answers [rows, ASKED], the places of their words [rows, ASKED, n], and whether there are
    such places [rows, ASKED].
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    said = weights > LEAST_WEIGHT
    opens = said[:, 1:] & ~said[:, :-1]
    starts = torch.multinomial(opens.float() + 1e-6, ASKED, replacement=True) + 1
    counted = opens.gather(1, starts - 1) & (starts > NEAR) & (starts < length - ANSWER)
    every = torch.arange(length, device=tokens.device)
    far = every < starts[..., None] - NEAR
    goals = torch.zeros(rows, ASKED, length, dtype=torch.bool, device=tokens.device)
    padded = functional.pad(tokens, (0, GRAM), value=-1)
    for offset in range(1, ANSWER - GRAM):
        first = (starts + offset).clamp(max=length - GRAM)
        inside = said.gather(1, first + GRAM - 1) & said.gather(1, first)
        here = far & inside[..., None]
        for at in range(GRAM):
            here = here & (padded[:, None, at : at + length] == tokens.gather(1, first + at)[..., None])
        count = here.sum(-1, keepdim=True)
        goals |= here & (count <= MOST)
    counted = counted & goals.any(-1)
    wide = functional.max_pool1d(goals.to(torch.float16), POOL // 2 * 2 + 1, stride=1, padding=POOL // 2)
    return starts, (wide > 0) & far, counted


def search_loss(attention: SelfAttention, x: Tensor, starts: Tensor, goals: Tensor, counted: Tensor) -> Tensor:
    """Return minus the mean logarithm of the attention that the best head has on the goals, over searching tokens."""
    back = torch.arange(SEARCHING, 0, -1, device=x.device)
    rows = (starts[..., None] - back).clamp(min=0)
    q, k = project_unrotated(attention, x, rows.flatten(1))
    looks = (q @ k.mT).float() * attention.dim**-0.5
    looks = looks.unflatten(2, (ASKED, SEARCHING))
    ahead = torch.arange(x.shape[1], device=x.device) > rows[:, None, :, :, None]
    looks = looks.masked_fill(ahead, -torch.inf)
    found = looks.masked_fill(~goals[:, None, :, None], -1e4).logsumexp(-1) - looks.logsumexp(-1)
    best = found.amax(1)
    where = counted[..., None].expand_as(best)
    return -(best * where).sum() / where.sum().clamp_min(1)
