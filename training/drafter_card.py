"""The model card of the demo's drafter, written from what the run measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.card import build_card, format_table, wrap_prose

CARD = """\
demo, its drafter

A Qwen3 of {parameters:.2f} million parameters ({layers} layers, hidden size {hidden}, {heads} query heads and
{kv_heads} key/value head of {head_dim}, vocabulary {vocabulary}, tied embeddings, bf16) that scores prompts for the
demo: what it looks at least is left out (`rekindle serve demo --prefill-compression auto`). It is there to be looked
through, not to be talked to. Its configuration allows {context} tokens; it was trained on {longest} at most.

## Recipe

`make train-demo-drafter` on a machine with CUDA does all of it from nothing, {tokens:.0f} million tokens in all, seed
{seed}, with the demo's tokenizer, corpus and tasks (the card of the demo tells what was held out):

{cycles}

Beside the loss of a language model, the last layer has one of its own ({share} of it): of the {searching} tokens that
open an answer, the best head is to look at the tokens where words of the answer stand, with queries and keys that are
not rotated, as they are scored. Weight decay {decay} for matrices, bf16 autocast. {seconds:.0f} s of training on one
{hardware}, with others beside it, torch {torch}.{ended} Digest of the parameters (blake2b): `{weights}`.

## Measured

Answers of the demo (digest `{target_weights}`) that are right to the last token, after prompts of held-out code with
one fact or several in it, of which one is asked for; {questions} prompts of 8192 tokens, fewer of longer ones, the same
ones in all columns. Kept is so much of the prompt by the server's own selection, with the drafter's scores, or of the
latest text, or of any. `python -m training.drafter_evaluate` measures again.

{table}
"""


def write_drafter_card(facts: Mapping[str, Any], measured: Mapping[str, Mapping[str, float]]) -> str:
    """README.md for the checkpoint folder. measured: shares of right answers, by prompt and by what was kept."""
    return wrap_prose(
        build_card(CARD).format(
            **facts, table=format_table("facts, tokens", measured, lambda part: f"{100 * part:.1f} %")
        )
    )
