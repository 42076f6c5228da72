"""Turns with the hybrid demo, whose earlier reasoning is left out, and a restart in between."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import evolve

from adapters import demo
from benchmarks.exactness import collect_answer
from effects.ids import Tokens
from effects.job import Job
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import build_options
from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_restart import kill, written
from tests.store.kit import settled

TURNS = 2  # before the restart, and as many after it
OPENS, THINKS, SAYS = (5, 6), 70, 96  # what opens a message; tokens of an answer that are reasoning, and all of them


class Talk:
    """Messages of random tokens; the last boundary opens the answer, whose reasoning begins behind it."""

    def __init__(self) -> None:
        self.draw, self.said, self.boundaries = random.Random(7), list[int](), list[int]()
        self.message(150)

    def message(self, content: int | Tokens) -> None:
        tokens = self.draw.choices(range(20, 900), k=content) if isinstance(content, int) else content
        self.boundaries.append(len(self.said) + len(OPENS))
        self.said += [*OPENS, *tokens]

    def asks(self) -> Job:
        self.message(90)
        opens = len(self.said) + len(OPENS)
        return Job((*self.said, *OPENS, 7), SAYS, boundaries=(*self.boundaries, opens))


async def alone(target: LoadedModel, job: Job) -> Tokens:
    """With nothing kept of anybody."""
    async with run_engine(evolve(target.settings, store=False), target.executor) as running:
        return (await collect_answer(running, evolve(job, scope=Scope("off"), speculate=False))).tokens


async def gone(running: Engine) -> None:
    while running.event_loop.world.requests:  # noqa: ASYNC110 - no event marks it
        await anyio.sleep(0.001)


# By default the next test does the same over HTTP, and `tests/engine/loading/test_stateful.py` compares with answers
# that are cold.
@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_turn_computes_what_is_new_and_less_than_a_block(tmp_path: Path) -> None:
    talk, before, tiers = Talk(), 0, list[str]()
    options = build_options(
        model="demo-hybrid",
        device="cpu",
        max_ctx=4096,
        slots=2,
        kv_cache_dir=tmp_path,
        kv_cache_min_tokens=64,
        host_cache_budget=64,
    )
    for _ in range(2):
        target = await load_target(options)
        assert target.transfer is not None
        jobs = list[tuple[Job, Tokens]]()
        settings = evolve(target.settings, rates=evolve(target.settings.rates, loads={}))  # restoring is trusted
        async with run_engine(settings, target.executor, transfer=target.transfer) as running:
            for _ in range(TURNS):
                job = talk.asks()
                found = await collect_answer(running, job)
                await gone(running)
                assert found.report is not None
                new = len(job.prompt) - before
                assert len(job.prompt) - found.report.restored_tokens <= new + 63, (
                    "what follows where the last answer opened, and less than a block"
                )
                jobs.append((job, found.tokens))
                tiers.append(found.report.tier)
                talk.message(found.tokens[THINKS:])
                before = job.boundaries[-1]
        settled(target.transfer.store)
        for job, tokens in jobs:
            assert await alone(target, job) == tokens
        await target.close()
    assert tiers == ["none", *["device"] * (TURNS - 1), "disk", *["device"] * (TURNS - 1)]


THOUGHT = "<think>We think about what was asked, and about what was said before, one thing after the other."
THINKING = f"""{{%- for message in messages %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n{THOUGHT}' }}}}{{% endif %}}"""


@pytest.fixture
def thinks(tmp_path: Path) -> Path:
    """Write a hybrid demo whose template lets it reason first. In later prompts an answer is its content alone."""
    folder = tmp_path / "thinks"
    folder.mkdir()
    for file in demo.FOLDERS["demo-hybrid"].iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": THINKING}
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.timeout(300)
def test_over_http_a_turn_computes_no_more_whatever_the_template_writes_behind_an_opening(
    thinks: Path, tmp_path: Path
) -> None:
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64", "--draft", "none")
    draw, messages, before, tiers = random.Random(5), list[dict[str, Any]](), 0, list[str]()

    @contextmanager
    def started() -> Iterator[Running]:
        with serving(str(thinks), *words, trusting=True) as server:
            yield server
            written(server)
            kill(server)

    for _ in range(2):
        with started() as server:
            behind = len(server.client.post("/tokenize", json={"content": THOUGHT}).json()["tokens"])
            assert 20 < behind < 60, "of what opens the answer, so that most ends of prefills are a block further"
            for _ in range(5):
                text = " ".join(draw.choices(("open", "file", "value", "list", "house", "seven"), k=60))
                messages.append({"role": "user", "content": text})
                body = {"messages": messages, "max_tokens": 70, "temperature": 0}
                found = server.client.post("/v1/chat/completions", json=body).json()
                prompt, restored = found["usage"]["prompt_tokens"], found["rekindle"]["restored_tokens"]
                assert prompt - restored <= prompt - before + 63, "what is new and less than a block"
                tiers.append(found["rekindle"]["tier"])
                before = prompt - behind
                messages.append({"role": "assistant", "content": "That is so.", "reasoning_content": "It is long."})
    assert tiers == ["none", *["device"] * 4, "disk", *["device"] * 4]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kept", "checkpoints"), [(192, 8), *(pytest.param(*each, marks=pytest.mark.long) for each in ((128, 8), (192, 0)))]
)
def test_a_prompt_whose_state_came_from_a_slot_is_restored_after_a_kill(
    tmp_path: Path, kept: int, checkpoints: int
) -> None:
    """Scope `off` leaves the state at a prompt's end on the device only. `full` finds it there and keeps it.

    The prompts end just before, at and behind `kept`, a multiple of the block size, so that the second request prefills
    most of a block, one row, or nothing at all.
    """
    words = ("--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-min-tokens", "64", "--host-cache-budget", "0")
    words = ("demo-hybrid", *words, "--draft", "none", "--paranoid", "--state-checkpoints", str(checkpoints))
    lengths = kept + 1, kept + 2, kept + 40, kept + 63
    prompts = [[30 + (7 + number) * at % 900 for at in range(length)] for number, length in enumerate(lengths)]
    # Where the device has no places for states, a slot's own state is all there is, so answers stay in its block.
    asked = {"temperature": 0, "max_tokens": 40 if checkpoints else 1, "ignore_eos": True}
    alone = list[str]()
    with serving(*words, "--slots", "4") as server:
        for prompt in prompts:
            for scope in ("off", "full"):
                done = server.complete(prompt, **asked, prefix_cache={"scope": scope}).json()
                alone.append(done["choices"][0]["text"])
            assert done["rekindle"]["restored_tokens"] == kept, "the slot has it"
            assert alone[-1] == alone[-2]
        entries = written(server)["entries"]
        kill(server)
    with serving(*words, "--slots", "4", trusting=True) as server:
        written(server, entries)  # files that the journal does not name are read while requests are served
        for number, (prompt, text) in enumerate(zip(prompts, alone[::2], strict=True)):
            done = server.complete(prompt, **asked).json()
            assert done["choices"][0]["text"] == text
            found = done["rekindle"]
            # The first restore is trusted, and measured. On a busy machine computing may be quicker from then on.
            quicker = number and (found["prefix_cache"]["miss"] or {}).get("reason") == "recompute_is_quicker"
            assert quicker or (found["restored_tokens"], found["tier"]) == (kept, "disk")
