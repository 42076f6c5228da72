"""The model card of the demo's draft, written from what the run measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.card import build_card, format_table, wrap_prose

CARD = """\
demo, its draft

A DFlash draft of {parameters:.1f} million parameters for the demo target beside it, in the published format:
{layers} layers of the target's own sizes, bf16. It proposes a block of up to {block} tokens in one forward (the first
one known, `{mask}` in every other slot); the target checks them, so answers do not change, they come sooner.

It reads the outputs of the target's layers {taps} (of 0 to {target_layers_last}); embedding and head are the target's,
and the mask is the target's own, untrained row. Its keys and values of the context take {cache} bytes a token.
It was trained in blocks of 4, 8 and {block} tokens, which are those that it is run with. It fits the
target whose parameters have the digest (blake2b, in bf16) `{target_weights}` and no other.

## Recipe

`make train-demo-draft` on a machine with CUDA does all of it.{ended}

The target first continues code of the training corpus, {said:.1f} million tokens, one of three continuations greedily,
the others at temperature 0.8. These are {spoken} of every batch; the rest are the tasks of the target's own training.
Then, with the frozen target in the same step:

{stages}

A slot's loss is the cross-entropy to the target's distribution at temperature 0.8, that to its likeliest token, and
the logarithm of what both distributions share. It weighs less the later the slot is, the worse the target would find
the tokens before it, and the less likely the draft would get that far. {began} Peak
rates {matrices} (Muon, matrices) and {others} (AdamW, norms), falling over the last {falling:.0%}, bf16 autocast;
{seconds:.0f} s of training on one {hardware},
torch {torch}. Digest of the parameters (blake2b): `{weights}`.

## Measured

Acceptance length: tokens a round of speculative decoding, the target's own token included, all tokens over all rounds
of {questions} prompts a subject; at most the block. Measured on the shipped bf16 weights by the exact rule (what equals
the target's token is accepted, up to the first that does not), along answers that the target gave by itself.
Prompts are made of files of the standard library that neither target nor draft was trained on, those of other authors
of whole packages that are no part of the corpus; tasks are those of training, with other words and other files.
Sampled: at temperature {temperature} with the noise that the server uses, the draft's tokens picked with the noise of
the target's. `python -m training.draft_evaluate` measures again.

{table}

The first token of an answer comes from the prompt and is in no round, and a round that the answer's end cuts short
counts whole, so short answers score lower than long ones would. Greedy answers to code often end in loops, which
are easily foreseen: code is answered with 128 tokens, but for the rows that say 32.
"""


def write_draft_card(facts: Mapping[str, Any], measured: Mapping[str, Mapping[str, float]], temperature: float) -> str:
    """README.md for the checkpoint folder. measured: tokens a round, by subject and way of decoding."""
    last = facts["target_layers"] - 1
    rows = format_table("answers", measured, "{:.2f}".format)
    return wrap_prose(build_card(CARD).format(**facts, table=rows, target_layers_last=last, temperature=temperature))
