"""The demo's tokenizer: byte-level BPE trained on the corpus and on samples of the tasks; every digit is a token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat_format import CONTROLS, END_OF_TURN, PAD, SHOWN, TEMPLATE
from training.corpus import Corpus
from training.tasks import Task
from training.words import Source

VOCABULARY = 4096
SAMPLES = 12_000
SEED = 4096


def train_tokenizer(corpus: Corpus, tasks: Sequence[Task]) -> Tokenizer:
    """Train a tokenizer of VOCABULARY tokens whose first ids are CONTROLS. It is the same for the same input."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(content, special=True, normalized=False) for content in CONTROLS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain(corpus.train, task_texts(corpus, tasks)), trainer)
    return Tokenizer.from_str(json.dumps(mark_shown_controls(json.loads(tokenizer.to_str())), ensure_ascii=False))


def task_texts(corpus: Corpus, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield texts of the tasks, without the control tokens."""
    rng, source = Random(SEED), Source(corpus.train)
    for _ in range(SAMPLES):
        for piece in rng.choice(tasks)(rng, source, 400):
            if isinstance(piece.content, str):
                yield without_controls(piece.content)


def without_controls(text: str) -> str:
    for control in CONTROLS:
        text = text.replace(control, "\n")
    return text


def mark_shown_controls(described: dict[str, Any]) -> dict[str, Any]:
    """Mark the tags of tools and thoughts as text, because clients read them."""
    for token in described["added_tokens"]:
        token["special"] = token["content"] not in SHOWN
    return described


def settings(context: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": context,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Token ids of each text; text that spells a control token becomes it."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
