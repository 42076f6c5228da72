"""Evaluates a draft: the tokens that a round of speculative decoding gives, the target's own token included.

`python -m training.draft_evaluate` evaluates the shipped draft on the shipped target, on a GPU or a CPU.

The target answers prompts first, by itself, one token at a time: greedily, or sampled with the noise that the server
uses, which seed and position fix. Speculation changes no token of these answers, so a round is known once the draft's
proposal at its first token is: it takes what equals the answer, up to the first token that does not, and one token
more. Prompts are made of files that were held out of the training.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import torch
from attrs import frozen
from tokenizers import Tokenizer
from torch import Tensor

from adapters.demo import FOLDER
from adapters.device.speculation.guesses import noise_shares
from adapters.models.kernels.functions.noise import gumbel
from training import tasks
from training.agents import ToolLoop
from training.batches import PAD_ID, flatten, row_random
from training.chat_format import CONTROLS
from training.corpus import HeldOut, read_held_out
from training.dialogues import chat, memory
from training.draft_export import load_draft
from training.draft_generate import Pick, generate, greedy
from training.draft_model import BlockSlots, DraftNetwork, embed_blocks, head, read_target
from training.draft_train import LEAST_WEIGHT
from training.evaluate import END_IDS, CopyAfter, find_answer_spans, hash_of
from training.export import load
from training.model import Qwen3
from training.tasks import Task
from training.tokenizer import encode
from training.tools import tool_chat
from training.words import Source

SEED = 2027
TEMPERATURE = 0.8
BATCH_TOKENS = 1 << 15
CODE_PROMPT = (64, 512)
TOOL_CALL = CONTROLS.index("<tool_call>")


@frozen
class Subject:
    """A kind of prompts.

    task: makes documents of at most `room` tokens; the prompt ends where one answer of the document begins. None: the
    prompt is plain code of CODE_PROMPT tokens. limit: tokens of an answer. opening: the first token of the answer.
    apart: True: documents are made of packages of other authors instead of the library's held-out files.
    """

    name: str
    task: Task | None
    room: int
    limit: int
    opening: int | None = None
    apart: bool = False


SUBJECTS = (
    Subject("code", None, 2048, 128),
    Subject("code, 32 tokens", None, 2048, 32),
    Subject("code of other authors", None, 2048, 128, apart=True),
    Subject("code of other authors, 32 tokens", None, 2048, 32, apart=True),
    Subject("code in a chat", tasks.continue_code, 1024, 128),
    Subject("tool calls (JSON)", tool_chat, 2048, 128, TOOL_CALL),
    Subject("tool loops", ToolLoop(), 2048, 128),
    Subject("chat", chat, 2048, 128),
    Subject("memory over turns", memory, 2048, 128),
    Subject("key to value, 2048", tasks.table_chat, 2048, 64),
    Subject("needles, 2048", tasks.needle_chat, 2048, 64),
    Subject("needles, 7168", tasks.needle_chat, 7168, 64),
    Subject("needles, 28672", tasks.needle_chat, 28672, 64),
    Subject("copy in a chat", tasks.copy_chat, 1024, 256),
    Subject("copy of random tokens", CopyAfter(tasks.HELD_OUT_SEPARATORS), 512, 256),
)


@frozen
class Continuation:
    """A prompt with the target's answer, from position `start` on. `seed`: of its noise."""

    tokens: Sequence[int]
    start: int
    seed: int


@frozen
class Taken:
    """The number of rounds, and of tokens that they gave.

    The first token of an answer comes from the prompt, not from a round.
    """

    tokens: int = 0
    rounds: int = 0

    @property
    def a_step(self) -> float:
        """The acceptance length, the target's own token included."""
        return self.tokens / max(self.rounds, 1)

    def __add__(self, other: Taken) -> Taken:
        return Taken(self.tokens + other.tokens, self.rounds + other.rounds)


def make_prompts(subject: Subject, tokenizer: Tokenizer, source: Source, count: int) -> list[list[int]]:
    """Return `count` prompts, the same ones every time."""
    found: list[list[int]] = []
    number = 0
    while len(found) < count:
        rng = row_random(SEED, number, hash_of(subject.name))
        number += 1
        prompt = (
            make_code_prompt(rng, tokenizer, source)
            if subject.task is None
            else cut_document(rng, subject, tokenizer, source)
        )
        if prompt:
            found.append(prompt)
    return found


def make_code_prompt(rng: Random, tokenizer: Tokenizer, source: Source) -> list[int]:
    """Return real code that begins at a line and ends anywhere."""
    size = tasks.split_room(rng, CODE_PROMPT[1], CODE_PROMPT[0])
    (ids,) = encode(tokenizer, [source.excerpt(rng, size * 6)])
    return ids[:size]


def cut_document(rng: Random, subject: Subject, tokenizer: Tokenizer, source: Source) -> list[int] | None:
    """Return a document up to one of its answers; None if no answer is of this subject."""
    assert subject.task is not None
    ids, weights = flatten(tokenizer, subject.task(rng, source, subject.room - 8))
    answers = find_answer_spans([float(weight > LEAST_WEIGHT) for weight in weights])
    fitting = [answer.start for answer in answers if subject.opening in (None, ids[answer.start])]
    start = rng.choice(fitting) if fitting else 0
    return ids[:start] if 0 < start <= subject.room else None


def generate_answers(
    target: Qwen3, prompts: Sequence[Sequence[int]], limit: int, temperature: float
) -> list[Continuation]:
    """Generate the target's answers, greedily at temperature 0. Row i is sampled with seed i."""
    found = []
    limit = min(limit, target.geometry.context - max(map(len, prompts)))
    rows = max(1, 8 * BATCH_TOKENS // max(map(len, prompts)))
    for begin in range(0, len(prompts), rows):
        some = prompts[begin : begin + rows]
        seeds = range(begin, begin + len(some))
        pick = make_coupled_pick(seeds, temperature) if temperature else greedy
        said = generate(target, some, limit, pick).tolist()
        for seed, prompt, tokens in zip(seeds, some, said, strict=True):
            stop = next(
                (at + 1 for at in range(len(prompt), len(prompt) + limit) if tokens[at] in END_IDS), len(prompt) + limit
            )
            found.append(Continuation(tokens[:stop], len(prompt), seed))
    return found


def make_coupled_pick(seeds: Sequence[int], temperature: float) -> Pick:
    """Return a function that samples as the server does: row i with the noise of `seeds[i]` at the token's position."""

    def pick(logits: Tensor, positions: Tensor) -> Tensor:
        noise = gumbel(zip(seeds, positions.tolist(), strict=True), logits.shape[-1], logits.device)
        return (logits.double() / temperature + noise).argmax(-1)

    return pick


@torch.inference_mode()
def compute_proposals(
    draft: DraftNetwork, target: Qwen3, some: Sequence[Continuation], slots: int, temperature: float
) -> list[Tensor]:
    """Return the draft's proposals after each token but the last, for each answer: [tokens - 1, slots - 1]."""
    device = target.cos.device
    longest = max(len(said.tokens) for said in some)
    most = max(len(said.tokens) - said.start for said in some)
    most = -(-most // 32) * 32  # a multiple of the draft's groups
    tokens = torch.full((len(some), longest), PAD_ID)
    for row, said in enumerate(some):
        tokens[row, : len(said.tokens)] = torch.tensor(said.tokens)
    tokens = tokens.to(device)
    starts = torch.tensor([said.start for said in some], device=device).unsqueeze(1)
    anchors = (starts + torch.arange(most, device=device)).clamp(max=longest - 1)
    _, aux_layers = read_target(target, tokens, draft.geometry.aux_layers)
    dtype = draft.fc.weight.dtype
    blocks = BlockSlots.of({slots: anchors})
    said_ = draft(draft.context(aux_layers.to(dtype)), blocks, embed_blocks(target, tokens, blocks).to(dtype))
    hidden = said_.unflatten(1, (-1, slots))[:, :, 1:]
    found = []
    for said, states in zip(some, hidden, strict=True):
        count = len(said.tokens) - said.start - 1
        logits = head(target, states[:count])
        found.append(logits.argmax(-1) if not temperature else pick_coupled(logits, said, temperature))
    return found


def pick_coupled(logits: Tensor, said: Continuation, temperature: float) -> Tensor:
    """Pick tokens as the server's draft does: with its share of the noise that the target's tokens are picked with.

    logits: [anchors, slots - 1, vocabulary].
    """
    count, slots, size = logits.shape
    reach = range(said.start + 1, said.start + count + slots)
    noise = gumbel([(said.seed, position) for position in reach], size, logits.device)
    share = torch.tensor(noise_shares(slots), device=logits.device).unsqueeze(1)
    positions = torch.arange(count, device=logits.device).unsqueeze(1) + torch.arange(slots, device=logits.device)
    return torch.stack(
        [
            (row.double() / temperature + share * noise[where]).argmax(-1)
            for row, where in zip(logits, positions, strict=True)
        ]
    )


def count_rounds(said: Continuation, proposed: Sequence[Sequence[int]]) -> Taken:
    """Count the rounds from the first token of the answer to its end."""
    answer = said.tokens[said.start :]
    at = rounds = 0
    while at < len(answer) - 1:
        accepted = 0
        for guess, token in zip(proposed[at], answer[at + 1 :], strict=False):
            if guess != token:
                break
            accepted += 1
        at = min(at + accepted + 1, len(answer) - 1)
        rounds += 1
    return Taken(len(answer) - 1, rounds)


def examine_draft(
    draft: DraftNetwork, target: Qwen3, every: Sequence[Continuation], slots: int, temperature: float
) -> Taken:
    """Count the rounds of all these answers."""
    total = Taken()
    waiting = sorted((said for said in every if len(said.tokens) > said.start + 1), key=lambda said: len(said.tokens))
    while waiting:
        rows = max(1, BATCH_TOKENS // len(waiting[-1].tokens))
        some, waiting = waiting[-rows:], waiting[:-rows]
        for said, proposed in zip(some, compute_proposals(draft, target, some, slots, temperature), strict=True):
            total += count_rounds(said, proposed.tolist())
    return total


Answered = Mapping[tuple[str, float], Sequence[Continuation]]


def answer_all(
    target: Qwen3,
    tokenizer: Tokenizer,
    texts: HeldOut,
    count: int,
    temperatures: Sequence[float],
    *,
    subjects: Iterable[Subject] = SUBJECTS,
) -> Answered:
    """The target's answers to `count` prompts of every subject, by the subject's name and temperature."""
    library, apart = Source(texts.stdlib), Source(texts.apart)
    found, began = {}, time.monotonic()
    for subject in subjects:
        if subject.room + subject.limit > target.geometry.context:
            continue
        prompts = make_prompts(subject, tokenizer, apart if subject.apart else library, count)
        for temperature in temperatures:
            found[subject.name, temperature] = generate_answers(target, prompts, subject.limit, temperature)
    print(f"the target answered in {time.monotonic() - began:.0f} s", flush=True)
    return found


def evaluate_draft(
    draft: DraftNetwork, target: Qwen3, answered: Answered, slots: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Tokens a round by subject, for blocks of each of `slots` and each temperature; printed as they come."""
    found: dict[str, dict[str, float]] = {}
    for (name, temperature), every in answered.items():
        way = f"at {temperature}" if temperature else "greedy"
        for size in slots:
            total = examine_draft(draft, target, every, size, temperature)
            found.setdefault(name, {})[f"{way}, block {size}"] = total.a_step
            print(f"{name}, {way}, block {size}: {total.a_step:.2f} ({total.tokens}/{total.rounds})", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER, help="the target's checkpoint folder")
    parser.add_argument("--draft", type=Path, default=FOLDER / "draft", help="the draft's checkpoint folder")
    parser.add_argument("--questions", type=int, default=4, help="prompts a subject")
    parser.add_argument("--subjects", default="", help="only those whose name begins so")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load(arguments.model, device, dtype)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    subjects = [subject for subject in SUBJECTS if subject.name.startswith(arguments.subjects)]
    answered = answer_all(
        target, tokenizer, read_held_out(), arguments.questions, (0.0, TEMPERATURE), subjects=subjects
    )
    draft = load_draft(arguments.draft, device, dtype)
    found = evaluate_draft(draft, target, answered, (8, draft.geometry.block))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
