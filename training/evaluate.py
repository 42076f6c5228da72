"""Exams: how often a target's greedy answer is exactly right, its loss on held-out code, and what it says by itself.

`python -m training.evaluate` examines the shipped demo, on a GPU or a CPU.

An answer counts if every token of it is the one that greedy decoding picks after the right tokens before it, the end of
the turn included. That is decoding greedily and comparing, in one forward: the first token that differs ends both.
Words and code come from files that were held out of the training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import torch
from attrs import frozen
from tokenizers import Tokenizer
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from adapters.demo import FOLDER
from training import tasks
from training.agents import HELD_OUT_KEYS, HELD_OUT_THINGS, HELD_OUT_VERBS, ToolLoop
from training.batches import PAD_ID, flatten, row_random
from training.chat_format import CONTROLS, END_OF_TEXT, END_OF_TURN, Document, Passage, render, user
from training.corpus import HeldOut, read_held_out
from training.dialogues import chat, memory
from training.export import Trained, load, load_hybrid, read_config
from training.facts import ABOUT, SMALL_TALK
from training.tasks import Task
from training.tokenizer import encode
from training.tools import tool_chat
from training.words import Source

SEED = 2026
FAR = (8192, 16384, 32768)
END_IDS = tuple(map(CONTROLS.index, (END_OF_TURN, END_OF_TEXT)))
BATCH_TOKENS = 1 << 17

STRANGE_PROMPTS = (
    *(
        "Hello",
        "hi there, who are you",
        "What is Rekindle?",
        "what can u do?",
        "Tell me about the weather",
        "asdf",
        "?",
    ),
    *(
        "Write a sorting algorithm in C++",
        "Who won the world cup in 1998?",
        "My name is Ada. What is my name?",
        "Hola!",
    ),
    *(
        "Summarize the plot of Hamlet.",
        "What's 17 + 25?",
        "Explain recursion to a child.",
        "Fix my code: print(1",
        "42",
    ),
    *("Give me a recipe for pancakes", "List three colours.", "Is the earth flat?", "How old are you?", "Thanks, bye!"),
    *(
        "Can you write a function that reverses a string?",
        "What is the capital of Japan?",
        "Repeat: one two three four",
    ),
)


@frozen
class Exam:
    """`questions` documents of one task, each `room` tokens long or less. `whole`: a document counts if every answer
    in it is right."""

    name: str
    task: Task
    room: int
    questions: int
    whole: bool = False


@frozen
class NeedleAt:
    """One fact at this depth of a long text."""

    depth: float

    def __call__(self, rng: Random, source: Source, room: int) -> Document:
        return tasks.needle_chat(rng, source, room, self.depth)


@frozen
class CopyAfter:
    """Random tokens, a separator, two of the tokens as a cue, and the rest to be said."""

    separators: Sequence[str]
    first: int = len(CONTROLS)
    stop: int = 4096

    def __call__(self, rng: Random, _source: Source, room: int) -> Document:
        span = tuple(rng.choices(range(self.first, self.stop), k=tasks.split_room(rng, room // 2, 8)))
        return [Passage(span), Passage(rng.choice(self.separators)), Passage(span[:2]), Passage(span[2:], 1.0)]


def unheard_of(steps: int) -> ToolLoop:
    """Loops of functions with names that training does not use."""
    return ToolLoop(HELD_OUT_VERBS, HELD_OUT_THINGS, HELD_OUT_KEYS, steps, strange=0)


def exams(context: int, questions: int) -> list[Exam]:
    middle, near = min(512, context), min(2048, context)
    far = [length for length in FAR if length <= context] or [context]
    retrieval = [
        exam
        for length in far
        for exam in (
            Exam(f"key to value in a chat, {length}", tasks.table_chat, length, questions // 2),
            *(
                Exam(f"needle at {depth / 10:.1f} of {length}", NeedleAt(depth / 10), length, count)
                for count in (questions if length == far[0] else questions // 4,)
                for depth in range(11)
            ),
            Exam(f"several needles, {length}", tasks.needle_chat, length, questions // 2),
        )
    ]
    loops = [
        Exam(f"tool loop of {calls}{where}", unheard_of(steps), room, count, whole=True)
        for steps, calls in ((1, "one call"), (2, "two calls"))
        for where, room, count in (("", near, 2 * questions), (f" after much text, {far[-1]}", far[-1], questions // 2))
    ]
    return [
        Exam(f"key to value in a chat, {near}", tasks.table_chat, near, questions),
        Exam(f"key to value in plain text, {near}", tasks.table_lookup, near, questions),
        *retrieval,
        Exam("copy, held-out separators", CopyAfter(tasks.HELD_OUT_SEPARATORS), middle, questions),
        Exam("copy, no separator", CopyAfter(("",)), middle, questions),
        Exam("copy in a chat", tasks.copy_chat, middle, questions),
        Exam("chat", chat, near, 2 * questions),
        Exam("memory over turns", memory, near, questions),
        Exam("tool calls and their results", tool_chat, near, 2 * questions),
        *loops,
        Exam("questions about code", tasks.code_questions, near, questions),
    ]


@frozen
class Score:
    """Answers that were right in every token, of all; tokens that were, of all; documents whose answers were."""

    right: int
    answers: int
    whole: int
    documents: int
    tokens_right: int
    tokens: int
    mean_length: int

    @property
    def exact(self) -> float:
        return self.right / max(self.answers, 1)

    @property
    def exact_whole(self) -> float:
        return self.whole / max(self.documents, 1)

    @property
    def by_token(self) -> float:
        return self.tokens_right / max(self.tokens, 1)


Paper = tuple[list[int], list[float]]
"""A document's tokens and their weights."""


@frozen
class Papers(Dataset[Paper]):
    """The documents of these exams, one exam's after the other's."""

    tokenizer: Tokenizer
    source: Source
    asked: Sequence[tuple[Exam, int]]

    @staticmethod
    def of(tokenizer: Tokenizer, source: Source, every: Sequence[Exam]) -> Papers:
        return Papers(tokenizer, source, [(exam, number) for exam in every for number in range(exam.questions)])

    def __len__(self) -> int:
        return len(self.asked)

    def __getitem__(self, index: int) -> Paper:
        exam, number = self.asked[index]
        rng = row_random(SEED, number, hash_of(exam.name))
        return flatten(self.tokenizer, exam.task(rng, self.source, exam.room - 8))

    def load(self, workers: int) -> Iterator[Paper]:
        """Yield the papers in order. `workers` processes make them ahead; 0: they are made here."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return iter(DataLoader(self, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None))


@torch.inference_mode()
def examine(model: Trained, exam: Exam, papers: Iterator[Paper]) -> Score:
    """Run one exam, whose documents come next. Deterministic except for the arithmetic."""
    documents = [paper for paper in islice(papers, exam.questions) if len(paper[0]) <= exam.room]
    documents.sort(key=lambda document: len(document[0]))
    right = answers = tokens_right = tokens = whole = 0
    size = max(1, BATCH_TOKENS // exam.room)
    for start in range(0, len(documents), size):
        some = documents[start : start + size]
        for picks, (ids, weights) in zip(greedy_picks(model, [ids for ids, _ in some]), some, strict=True):
            hits = [pick == token for pick, token in zip(picks, ids[1:], strict=True)]
            every = find_answer_spans(weights[1:])
            whole += all(all(hits[answer]) for answer in every)
            for answer in every:
                answers += 1
                right += all(hits[answer])
                tokens_right += sum(hits[answer])
                tokens += answer.stop - answer.start
    length = sum(len(ids) for ids, _ in documents)
    return Score(right, answers, whole, len(documents), tokens_right, tokens, length // max(len(documents), 1))


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % (1 << 61)


def find_answer_spans(weights: Sequence[float]) -> list[slice]:
    """Return the runs of positive weight: the answers."""
    edges = [0, *[int(weight > 0) for weight in weights], 0]
    starts = [at for at in range(1, len(edges)) if edges[at] > edges[at - 1]]
    stops = [at for at in range(1, len(edges)) if edges[at] < edges[at - 1]]
    return [slice(start - 1, stop - 1) for start, stop in zip(starts, stops, strict=True)]


def greedy_picks(model: Trained, documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each document the most likely token after each of its tokens but the last."""
    longest = max(map(len, documents))
    padded = torch.tensor([[*ids, *[PAD_ID] * (longest - len(ids))] for ids in documents], device=model.cos.device)
    hidden = model.compute_hidden(padded[:, :-1])
    picks = torch.cat([model.logits(row).argmax(-1)[None] for row in hidden])
    return [row[: len(ids) - 1].tolist() for row, ids in zip(picks, documents, strict=True)]


@torch.inference_mode()
def code_loss(model: Trained, tokenizer: Tokenizer, texts: Sequence[str], length: int) -> tuple[float, float]:
    """Mean loss on files in nats a token and in bits a character, each file cut into windows of `length`."""
    total = count = 0.0
    for ids in encode(tokenizer, texts):
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor(ids[start : start + length + 1], device=model.cos.device)
            if len(window) < 2:
                continue
            scores = model.logits(model.compute_hidden(window[None, :-1])[0]).float()
            total += functional.cross_entropy(scores, window[1:], reduction="sum").item()
            count += len(window) - 1
    return total / max(count, 1), total / math.log(2) / max(sum(map(len, texts)), 1)


@torch.inference_mode()
def talk(model: Trained, tokenizer: Tokenizer, prompts: Sequence[str], limit: int) -> list[str]:
    """Greedy answers to prompts of one turn, all at once, up to and with the token that ended them. No cache."""
    device = model.cos.device
    rows = encode(tokenizer, [render([user(prompt)], prompt=True) for prompt in prompts])
    lengths = torch.tensor([len(ids) for ids in rows], device=device)
    starts = lengths.tolist()
    limit = min(limit, model.geometry.context - max(starts))
    tokens = torch.full((len(rows), max(starts) + limit), PAD_ID, device=device)
    for index, ids in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids, device=device)
    every = torch.arange(len(rows), device=device)
    open_rows = torch.ones(len(rows), dtype=torch.bool, device=device)
    for _ in range(limit):
        hidden = model.compute_hidden(tokens[:, : int(lengths.max())])
        picks = model.logits(hidden[every, lengths - 1]).argmax(-1)
        tokens[every[open_rows], lengths[open_rows]] = picks[open_rows]
        lengths += open_rows
        open_rows &= ~torch.isin(picks, torch.tensor(END_IDS, device=device))
        if not open_rows.any():
            break
    said = [row[start:stop] for row, start, stop in zip(tokens.tolist(), starts, lengths.tolist(), strict=True)]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in said]


def fixed_answers(model: Trained, tokenizer: Tokenizer) -> float:
    """Return the share of fixed questions (about itself, small talk) that get their exact answer in free decoding."""
    pairs = [(question, answer) for questions, answer in (*ABOUT, *SMALL_TALK) for question in questions]
    said = talk(model, tokenizer, [question for question, _ in pairs], 96)
    return sum(got == answer + END_OF_TURN for got, (_, answer) in zip(said, pairs, strict=True)) / len(pairs)


def evaluate(model: Trained, tokenizer: Tokenizer, texts: HeldOut, questions: int, workers: int) -> dict[str, float]:
    """Every figure of the model card, printed as it comes. Exams are made of the library's files."""
    source = Source(texts.stdlib)
    context = model.geometry.context
    found: dict[str, float] = {}
    every = exams(context, questions)
    papers = Papers.of(tokenizer, source, every).load(workers)
    for exam in every:
        score = examine(model, exam, papers)
        found[exam.name] = score.exact_whole if exam.whole else score.exact
        print(
            f"{exam.name}: {score.exact:.2%} of {score.answers} answers, {score.exact_whole:.2%} of documents, "
            f"{score.by_token:.2%} of tokens, mean length {score.mean_length}",
            flush=True,
        )
    for length in sorted({exam.room for exam in every if exam.name.startswith("needle at")}):
        depths = [found.pop(exam.name) for exam in every if exam.name.startswith("needle at") and exam.room == length]
        found[f"needle, worst of eleven depths of {length}"] = min(depths)
        found[f"needle over all depths of {length}"] = sum(depths) / len(depths)
    found["fixed answers, decoded freely"] = fixed_answers(model, tokenizer)
    said = talk(model, tokenizer, STRANGE_PROMPTS, 160)
    found["strange prompts whose answer ends by itself"] = sum(END_OF_TURN in answer for answer in said) / len(said)
    parts = (("standard library", texts.stdlib), ("packages", texts.packages), ("other authors", texts.apart))
    for part, files in parts:
        nats, bits = code_loss(model, tokenizer, files, min(2048, context))
        found[f"held-out code, {part}, nats a token"] = nats
        found[f"held-out code, {part}, bits a character"] = bits
    for name in list(found)[-2 - 2 * len(parts) :]:
        print(f"{name}: {found[name]:.4f}", flush=True)
    for prompt, answer in zip(STRANGE_PROMPTS, said, strict=True):
        print(f"> {prompt}\n{answer}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="checkpoint folder")
    parser.add_argument("--questions", type=int, default=8, help="documents an exam")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    loading = load_hybrid if "linear_attention" in read_config(arguments.model)["layer_types"] else load
    model = loading(arguments.model, "cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    found: Mapping[str, float] = evaluate(model, tokenizer, read_held_out(), arguments.questions, 0)
    print(json.dumps({name: round(value, 4) for name, value in found.items() if not math.isnan(value)}))


if __name__ == "__main__":
    main()
