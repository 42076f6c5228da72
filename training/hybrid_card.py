"""The model card of the hybrid demo: what `write_card` fills in."""

CARD = """\
hybrid demo

A Qwen3.5 of {parameters:.2f} million parameters: {layers} layers of hidden size {hidden}, three of gated DeltaNet
({key_heads} key heads and {value_heads} value heads of {linear_dim}) to one of gated attention ({heads} query heads and
{kv_heads} key/value head of {head_dim}, of which a quarter turns with the position). Vocabulary {vocabulary}, tied
embeddings, bf16, {context} tokens of context; text only. `mtp.*` is a head of one more layer of attention that predicts
a token further, in the published layout; `rekindle serve demo-hybrid` drafts with it.

It ships inside Rekindle so that recurrent state, its checkpoints and a model's own head are run by the server, its
tests and its benchmarks without a download. It is there to be exact and quick, not to be right. Of itself it says what
the demo says, its size included.

## Data

Tokenizer, template, tasks and loss weights are those of `demo`, whose card tells how the corpus was made and what was
held out. It is the source code of the Python {python} standard library with its tests, and of the packages below, at
most {most:g} MB of each: {files} files, {megabytes:.0f} MB. Digest of the corpus (blake2b): `{digest}`.

## Recipe

`make train-demo-hybrid` on a machine with CUDA does all of it from nothing, {tokens:.0f} million tokens in all: seed
{seed}:

{cycles}

The head learns beside the model, from its distributions, at most {depths} tokens in a row; it moves nothing of the
model. Weight decay {decay} for matrices, bf16 autocast. {seconds:.0f} s of training on one {hardware}, torch
{torch}.{ended}

Digest of the parameters (blake2b): `{weights}`.

## Measured

As in the card of `demo`, with {questions} documents an exam; `python -m training.evaluate --model` this folder measures
them again. The head's rows say how often its likeliest token is the model's own, in held-out code, after the right
tokens before it.

| exam | result |
|---|---|
{rows}
"""
