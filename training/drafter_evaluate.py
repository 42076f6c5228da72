"""Evaluates prompt compression: the target's answers to prompts that the drafter, and simpler rules, have shortened.

`python -m training.drafter_evaluate` evaluates the shipped drafter with the shipped demo.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from attrs import frozen
from tokenizers import Tokenizer

from adapters.demo import FOLDER
from adapters.device.compression.select_tokens import TokenMarks, select
from effects.compression import PromptPart
from training import tasks
from training.batches import flatten, row_random
from training.chat_format import CONTROLS, END_OF_TURN, TURN
from training.corpus import HeldOut, read_held_out
from training.drafter_model import ScoringModel
from training.evaluate import SEED, find_answer_spans, greedy_picks, hash_of
from training.export import load, load_drafter
from training.model import Qwen3
from training.tokenizer import encode
from training.words import Source

LENGTHS = (8192, 16384, 32768, 65536)
KEEP = (50, 100, 200)  # thousandths
TURN_ID, END_ID = map(CONTROLS.index, (TURN, END_OF_TURN))

Scores = Callable[[Sequence[int]], Sequence[float]]


@frozen
class Question:
    """A prompt and its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make_questions(tokenizer: Tokenizer, source: Source, length: int, count: int, needles: int) -> list[Question]:
    """Make questions about facts that are hidden in code: one, or several if `needles` is 0. Always the same."""
    found: list[Question] = []
    (read,) = encode(tokenizer, [tasks.READ + END_OF_TURN])
    number = 0
    while len(found) < count:
        rng = row_random(SEED, number, hash_of(f"{needles} of {length}"))
        number += 1
        depth = rng.random() if needles == 1 else None
        ids, weights = flatten(tokenizer, tasks.needle_chat(rng, source, length - 64, depth))
        first = next(said for said in find_answer_spans(weights) if ids[said] != read)
        if first.stop <= length:
            found.append(Question(tuple(ids[: first.start]), tuple(ids[first])))
    return found


def parts_of(prompt: Sequence[int]) -> list[PromptPart]:
    """Return the messages of a prompt in the demo's template. A short last question is protected."""
    starts = [at + 1 for at, token in enumerate(prompt) if token == TURN_ID][:-1]
    stops = [at for at, token in enumerate(prompt) if token == END_ID]
    every = list(zip(starts, stops, strict=False))
    return [
        PromptPart("user", start, stop, protected=(start, stop) == every[-1] and stop - start < 1024)
        for start, stop in every
    ]


def marks_of(tokenizer: Tokenizer) -> TokenMarks:
    """Return the marks of the demo's tokens, as the server computes them."""
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    return TokenMarks(
        bytes(text.rstrip(" \t\r").endswith("\n") for text in texts),
        bytes(text.rstrip().endswith((".", "!", "?", ";")) for text in texts),
        frozenset(range(len(CONTROLS))),
    )


def shorten_prompt(question: Question, scores: Sequence[float], marks: TokenMarks, keep: int) -> list[int]:
    prompt = question.prompt
    kept = select(prompt, scores, parts_of(prompt), marks, keep=len(prompt) * keep // 1000, most=len(prompt))
    assert kept is not None, "what has to stay is a part of the prompt"
    return [token for start, stop in kept.spans for token in prompt[start:stop]]


@torch.inference_mode()
def is_answered_right(target: Qwen3, prompt: Sequence[int], answer: Sequence[int]) -> bool:
    picks = greedy_picks(target, [[*prompt, *answer]])[0]
    return picks[len(prompt) - 1 :] == list(answer)


def evaluate_drafter(
    drafter: ScoringModel, target: Qwen3, tokenizer: Tokenizer, texts: HeldOut, count: int
) -> dict[str, dict[str, float]]:
    """Return the shares of right answers, by kind of question and by what is kept. They are printed as they come."""
    source, marks = Source(texts.stdlib), marks_of(tokenizer)
    device = drafter.cos.device

    def score_prompt(prompt: Sequence[int]) -> Sequence[float]:
        found: list[float] = drafter.scores(torch.tensor(prompt, device=device)).tolist()
        return found

    ways: Mapping[str, Scores] = {
        "the drafter": score_prompt,
        "the latest": lambda prompt: range(len(prompt)),
        "any": lambda prompt: Random(len(prompt)).choices((0.0, 1.0), k=len(prompt)),
    }
    found: dict[str, dict[str, float]] = {}
    for length in (length for length in LENGTHS if length <= drafter.geometry.context):
        for needles, name in ((1, "one fact"), (0, "several")):
            asked = make_questions(tokenizer, source, length, max(1, count * 8192 // length), needles)
            row = found.setdefault(f"{name}, {length}", {})
            if length <= target.geometry.context:
                row["all of it"] = compute_share(is_answered_right(target, one.prompt, one.answer) for one in asked)
            for way, scores in ways.items():
                every = [scores(one.prompt) for one in asked]
                for keep in KEEP if way == "the drafter" else KEEP[1:2]:
                    kept = [shorten_prompt(one, looks, marks, keep) for one, looks in zip(asked, every, strict=True)]
                    row[f"{way}, {keep / 10:g} %"] = compute_share(
                        is_answered_right(target, prompt, one.answer) for prompt, one in zip(kept, asked, strict=True)
                    )
            print(f"{name}, {length}: " + ", ".join(f"{way} {part:.1%}" for way, part in row.items()), flush=True)
    return found


def compute_share(every: Iterable[bool]) -> float:
    hits = list(every)
    return sum(hits) / max(len(hits), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="the target's checkpoint folder")
    parser.add_argument("--drafter", type=Path, default=FOLDER / "drafter", help="the drafter's checkpoint folder")
    parser.add_argument("--questions", type=int, default=8, help="of 8192 tokens; fewer of longer ones")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, drafter = load(arguments.model, device, dtype), load_drafter(arguments.drafter, device, dtype)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    print(json.dumps(evaluate_drafter(drafter, target, tokenizer, read_held_out(), arguments.questions)))


if __name__ == "__main__":
    main()
