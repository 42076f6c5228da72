"""Tasks are well formed, the same for the same seed, and keep to their room; their answers stand in their prompts."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random

import pytest

from training import tasks, tools
from training.batches import flatten
from training.chat_format import CONTROLS, END_OF_TURN
from training.dialogues import EXCHANGES, memory
from training.recipe import SHORT, TARGET
from training.train import list_windows
from training.words import key, value

TASKS = list(SHORT)
NAMES = [getattr(task, "__name__", type(task).__name__) for task in TASKS]


def prompt_and_answer(document):
    """The text before the last answer, and that answer."""
    last = max(at for at, piece in enumerate(document) if piece.weight)
    return "".join(piece.content for piece in document[:last]), document[last].content


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
def test_a_task_is_the_same_for_the_same_seed_and_another_for_another(task, source):
    first, again, other = (task(Random(seed), source, 300) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
@pytest.mark.parametrize("room", [800, 2000])
def test_a_task_has_something_to_learn_and_mostly_fits_its_room(task, room, source, tokenizer):
    lengths, learnt = [], 0.0
    for seed in range(10):
        ids, weights = flatten(tokenizer, task(Random(seed), source, room))
        assert len(ids) == len(weights)
        learnt += sum(weights)
        assert min(ids) >= 0
        assert max(ids) < tokenizer.get_vocab_size()
        lengths.append(len(ids))
    assert learnt > 0
    if task is not tasks.code:  # which is cut where the row ends
        assert sorted(lengths)[3] <= room


@pytest.mark.parametrize("task", [tasks.table_chat, tasks.needle_chat, memory])
def test_a_retrieval_answer_ends_its_turn_and_its_value_stands_in_the_prompt(task, source):
    for seed in range(20):
        prompt, answer = prompt_and_answer(task(Random(seed), source, 400))
        assert answer.endswith(END_OF_TURN)
        value = answer.removesuffix(END_OF_TURN).removesuffix(".").split(". The ")[-1].split(" is ", 1)[-1]
        assert value in prompt


def test_a_needle_stands_at_the_depth_it_is_given(source):
    for depth in (0.0, 0.5, 1.0):
        text, answer = prompt_and_answer(tasks.needle_chat(Random(3), source, 2000, depth))
        value = answer.removesuffix(END_OF_TURN).removesuffix(".").split(" is ", 1)[-1]
        assert abs(text.index(value) / len(text) - depth) < 0.15


def test_token_copies_begin_with_a_cue_and_end_where_the_first_ended(source):
    copy = tasks.CopyTokens(16, 4096)
    for seed in range(50):
        spans = [piece for piece in copy(Random(seed), source, 200) if isinstance(piece.content, tuple)]
        whole = spans[0].content
        learnt = [piece.content for piece in spans if piece.weight]
        assert learnt
        assert all(part == whole[len(whole) - len(part) :] for part in learnt)


def test_held_out_separators_are_not_trained_on():
    assert not set(tasks.SEPARATORS) & set(tasks.HELD_OUT_SEPARATORS)


def test_a_tool_call_is_json_that_names_an_offered_tool_with_the_asked_arguments(source):
    calls = 0
    for seed in range(40):
        document = tools.tool_chat(Random(seed), source, 500)
        offered = {
            json.loads(line)["function"]["name"]
            for line in document[0].content.splitlines()
            if line.startswith('{"type": "function"')
        }
        for before, piece in pairwise(document):
            for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", piece.content) if piece.weight else ():
                made = json.loads(body)
                assert made["name"] in offered
                assert all(tools.spell(given) in before.content for given in made["arguments"].values())
                calls += 1
    assert calls > 20


@pytest.mark.parametrize("make", [make for make, _ in EXCHANGES], ids=lambda make: make.__name__)
def test_an_exchange_has_a_question_and_an_answer_and_no_control_tokens(make, source):
    for seed in range(30):
        question, answer = make(Random(seed), source)
        assert question.strip()
        assert answer.strip()
        assert not any(control in question + answer for control in CONTROLS)


def test_keys_and_values_are_never_empty(source):
    rng = Random(0)
    assert all(key(rng, word) and value(rng, word) for word in source.words(rng, 200))


def test_the_first_cycle_is_the_unit_of_time_and_the_last_stage_reads_the_whole_context():
    assert sum(stage.share for stage in TARGET.cycles[0].stages) == pytest.approx(1)
    assert max(windows.shape.length for windows in list_windows(TARGET.stages[-1])) == TARGET.geometry.context
