"""The drafter: what its last layer is to look at, that it learns that, and that it is scored as training scores it."""

from __future__ import annotations

from random import Random

import pytest
import torch

from adapters.models.decoder.scorer import Scorer
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.open_checkpoint import Checkpoint
from training.batches import Batches, BatchShape, flatten
from training.chat_format import CONTROLS, conversation, user
from training.chat_format import assistant as says
from training.drafter import DRAFTER
from training.drafter_evaluate import Question, make_questions, marks_of, parts_of, shorten_prompt
from training.drafter_model import ASKED, NEAR, ScoringModel, find_repeats
from training.export import export
from training.model import Geometry
from training.tasks import ANSWER_WEIGHT, CODE_CHARS, table_chat

TINY = Geometry(hidden=64, inner=96, layers=2, heads=2, head_dim=32, context=1024)


def make_document(tokenizer, source, question, answer, line):
    """Ids and weights of one question about a line within code, padded by code."""
    code = source.code(Random(3), round(600 * CODE_CHARS))
    text = f"{code[: len(code) // 2]}\n{line}\n{code[len(code) // 2 :]}"
    document = conversation([user(f"{text}\n\n{question}"), says(answer)], weight=ANSWER_WEIGHT)
    return flatten(tokenizer, [*document, *conversation([user(source.code(Random(4), 200))])])


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("violet-7731", "# the locker of Otto is violet-7731."),
        ("The locker of Otto is 990217.", "Otto has the locker 990217."),
    ],
)
def test_what_is_to_be_looked_at_is_where_the_answer_stands_not_where_it_is_asked_for(answer, line, source, tokenizer):
    ids, weights = make_document(tokenizer, source, "What is the locker of Otto?", answer, line)
    starts, goals, counted = find_repeats(torch.tensor([ids]), torch.tensor([weights]))
    assert counted.any()
    start = int(starts[0][counted[0]][0])
    assert tokenizer.decode(ids[start:], skip_special_tokens=False).startswith(answer)
    where = goals[0][counted[0]][0].nonzero().flatten()
    assert int(where.max()) < start - NEAR
    looked_at = tokenizer.decode([ids[at] for at in where.tolist()])
    assert answer.rstrip(".").split()[-1] in looked_at
    assert len(where) < 60


def test_an_answer_that_stands_nowhere_is_not_looked_for(source, tokenizer):
    ids, weights = make_document(
        tokenizer, source, "Who is Otto?", "Quite another zebra xylophone.", "Otto has a locker."
    )
    assert not find_repeats(torch.tensor([ids]), torch.tensor([weights]))[2].any()


@pytest.mark.long
def test_it_learns_to_look(source, tokenizer):
    """The tokens that open an answer look elsewhere at first, and after some steps where it stands."""
    torch.manual_seed(1)
    model = ScoringModel(TINY)
    tokens, weights = Batches(tokenizer, source, {table_chat: 1.0}, BatchShape(4, 255), 1, whole=1.0)[0]
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(12):
        torch.manual_seed(2)  # the same answers of each row
        model.share = 1.0
        both = model(tokens, weights)
        model.share = 0.0
        found.append((both - model(tokens, weights)).item())
        both.backward()
        stepper.step()
        stepper.zero_grad()
    assert found[-1] < 0.5 * found[0]


def test_the_server_scores_with_it_as_training_does(tokenizer, tmp_path):
    torch.manual_seed(2)
    model = ScoringModel(TINY)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    export(model, tokenizer, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    scorer = Scorer(
        checkpoint.config, checkpoint, CpuKernels(torch.float32), torch.device("cpu"), torch.float32, (64,), 1024
    )
    scorer.weights.load_back()
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    tokens = torch.randint(len(CONTROLS), 4096, (203,))
    work = scorer.begin(tuple(tokens.tolist()))
    while not work.complete:
        work.advance()
    assert work.scores() == pytest.approx(model.scores(tokens).tolist(), rel=2e-3, abs=1e-6)


def test_an_exam_has_the_same_questions_every_time_and_keeps_what_is_looked_at(source, tokenizer):
    (one,) = make_questions(tokenizer, source, 2048, 1, needles=1)
    assert make_questions(tokenizer, source, 2048, 1, needles=1) == [one]
    assert {part.role for part in parts_of(one.prompt)} == {"user"}
    said = Random(5).sample(range(len(CONTROLS), 4096), 1500)  # nothing twice: no word of the end stands before it
    made = Question((*one.prompt[:3], *said, *one.prompt[-6:]), one.answer)
    scores = [0.0] * len(made.prompt)
    scores[700:800] = [1.0] * 100
    kept = shorten_prompt(made, scores, marks_of(tokenizer), 200)
    assert len(kept) <= 0.2 * len(made.prompt)
    assert kept[-6:] == list(made.prompt[-6:])
    assert set(made.prompt[710:790]) <= set(kept)


def test_what_is_asked_of_a_row_is_bounded():
    weights = torch.zeros(2, 400)
    weights[:, 100:200] = ANSWER_WEIGHT
    starts, goals, counted = find_repeats(torch.randint(16, 4096, (2, 400)), weights)
    assert starts.shape == counted.shape == (2, ASKED)
    assert goals.shape == (2, ASKED, 399)


def test_what_is_shipped_is_small():
    count = sum(parameter.numel() for parameter in ScoringModel(DRAFTER.geometry).parameters())
    assert count * 2 < 3_600_000
