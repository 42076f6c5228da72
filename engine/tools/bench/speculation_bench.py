"""`rekindle bench speculation`: how many proposals of each kind of draft are right in the answers of agent logs.

The model is made to give the logged answers, token by token, and every decode step proposes as much as it may. So the
result says what a draft knows of these texts, and not when the server would let it propose. No server is needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import anyio
from attrs import asdict, define, evolve
from rich.console import Console
from rich.table import Table

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.speculation.suffix_proposer import SuffixProposer
from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode, make_copying
from effects.grammar import Grammar
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.prefill import OpenSlot, RunPrefill
from engine.loading.background_load import load_target
from engine.settings.options import build_options
from engine.settings.output.progress import count_progress
from engine.settings.paths import find_model_folder
from engine.settings.user_error import UserError
from engine.tools.bench.forced_answer import force_answers
from engine.tools.bench.speculation_options import SpeculationBenchOptions
from engine.tools.simulation.logs.read_log import Logs, read_logs
from states.copy_branches import count_branch_tokens

SLOT = SlotId(0)


@define
class DraftFigures:
    """Counts of one kind of draft. steps: decode steps of all answers. proposing: those in which it proposed."""

    draft: str
    requests: int = 0
    tokens: int = 0
    steps: int = 0
    proposing: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)

    @property
    def accepted_per_proposal_step(self) -> float:
        return self.accepted / max(1, self.proposing)

    def count(self, done: Decoded) -> None:
        """Count a launch, of which one step has proposed at most."""
        self.tokens += len(done.tokens)
        self.steps += done.steps
        self.proposing += done.proposed > 0
        self.proposed += done.proposed
        self.accepted += done.accepted


def run_speculation_bench(wanted: SpeculationBenchOptions) -> int:
    """Measure every kind of draft and print the figures. Raises UserError or OSError."""
    model = None if wanted.model.startswith("demo") else find_model_folder(build_options(model=wanted.model).model)
    texts = choose_requests(read_logs(wanted.log, model), wanted)
    if not texts:
        raise UserError("--log: no request there has a prompt and an answer of two tokens or more")
    figures = [
        draft_figures for name in wanted.drafts for draft_figures in anyio.run(measure_draft, name, wanted, texts)
    ]
    if wanted.json:
        print(json.dumps([describe_figures(draft_figures) for draft_figures in figures], indent=2))
    else:
        print_figures(figures, wanted)
    return 0


def choose_requests(logs: Logs, wanted: SpeculationBenchOptions) -> list[tuple[Tokens, Tokens]]:
    """Return prompts and answers, evenly taken from all requests of the logs."""
    texts = [
        (request.prompt[-wanted.prompt_tokens :], request.answer[: wanted.answer_tokens])
        for session in logs.sessions
        for agent in session.agents
        for request in agent.requests
        if request.length > 1 and len(request.answer) > 1
    ]
    count = min(wanted.requests, len(texts))
    return [texts[at * len(texts) // count] for at in range(count)]


async def measure_draft(
    name: str, wanted: SpeculationBenchOptions, texts: Sequence[tuple[Tokens, Tokens]]
) -> list[DraftFigures]:
    """Give all answers with one kind of draft. Raises UserError.

    Copies are measured twice where the model verifies trees: as chains, and with branches.
    """
    kept = {"disk_prefix_cache": "off", "host_cache_budget": 0, "draft_residency": "persistent"}
    target = await load_target(build_options(model=wanted.model, draft=name, slots=1, **kept))
    try:
        settings = target.settings
        copies = not settings.max_proposals
        width = min(wanted.width, settings.max_copied if copies else settings.max_proposals)
        if not width:
            raise UserError(f"--draft {name}: {wanted.model} has no such draft, so nothing is proposed")
        answers = {str(number): answer for number, (_, answer) in enumerate(texts)}
        match = force_answers(answers, target.checkpoint.config.vocab_size)
        branch = count_branch_tokens(width, settings.max_branch) if copies else 0
        ways = {name: 0} | ({f"{name}, trees": branch} if branch else {})
        found = list[DraftFigures]()
        for way, count in ways.items():
            executor = DeviceExecutor(evolve(forget_texts(target.executor.parts), match_grammar=match))
            sizes = settings.chunk, settings.max_context
            replay = AnswerReplay(executor, *sizes, copies, width, count, DraftFigures(way))
            with count_progress(f"answers with {way}", len(texts)) as step:
                for number, (prompt, answer) in enumerate(texts):
                    await replay.give_answer(number, prompt, answer)
                    step()
            found.append(replay.figures)
        return found
    finally:
        await target.close()


def forget_texts(parts: ExecutorParts) -> ExecutorParts:
    """Return the parts of an executor that has not copied anything yet: it knows no earlier answers."""
    known = parts.text_proposer
    return evolve(parts, text_proposer=SuffixProposer(known.matcher)) if isinstance(known, SuffixProposer) else parts


@define
class AnswerReplay:
    """Gives answers on an executor, one after the other.

    copies: proposals are copied from earlier text. width: tokens that a decode step proposes. branch: of these, the
    tokens on the branch of a copied chain.
    """

    executor: DeviceExecutor
    chunk: int
    context: int
    copies: bool
    width: int
    branch: int
    figures: DraftFigures

    async def give_answer(self, number: int, prompt: Tokens, answer: Tokens) -> None:
        """Compute the prompt, then give the answer. Raises UserError if the device fails."""
        prompt = prompt[-(self.context - len(answer) - 1) :]
        request = RequestId(number + 1)
        sampling = Sampling(grammar=Grammar("regex", str(number)))
        self.executor.open(request, OpenSlot(SLOT, SLOT, 0, prompt, sampling))
        for start in range(0, len(prompt) - 1, self.chunk):
            await self._perform(request, RunPrefill(SLOT, start, min(start + self.chunk, len(prompt) - 1)))
        tokens = list(prompt)
        end = len(prompt) + len(answer)
        while len(tokens) < end:
            left = end - len(tokens)
            step = RunDecode(SLOT, len(tokens) - 1, tokens[-1], min(self.width, left - 1))
            if self.copies:
                # The launch ends with its first step that copies something.
                rule = make_copying(self.width, self.branch, steps=1)
                step = evolve(step, propose=0, steps=left, copying=rule)
            done = await self._perform(request, step)
            assert isinstance(done, Decoded)
            self.figures.count(done)
            tokens += done.tokens
        self.figures.requests += 1

    async def _perform(self, request: RequestId, effect: RunPrefill | RunDecode) -> object:
        (outcome,) = await self.executor.perform(Launch((EffectRequest(request, effect),)))
        if not isinstance(outcome, effect.outcomes[0]):
            raise UserError(f"the model failed: {outcome}")
        return outcome


def describe_figures(figures: DraftFigures) -> dict[str, object]:
    return {
        **asdict(figures),
        "tokens_per_step": round(figures.tokens_per_step, 3),
        "accepted_per_proposal_step": round(figures.accepted_per_proposal_step, 3),
    }


def print_figures(figures: Sequence[DraftFigures], wanted: SpeculationBenchOptions) -> None:
    """Print a table with a row for each kind of draft."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("draft", no_wrap=True)
    for name in ("tokens", "steps", "proposing", "proposed", "accepted", "right", "tokens a step"):
        table.add_column(name, justify="right")
    for draft_figures in figures:
        share = draft_figures.accepted / max(1, draft_figures.proposed)
        counts = (
            draft_figures.tokens,
            draft_figures.steps,
            draft_figures.proposing,
            draft_figures.proposed,
            draft_figures.accepted,
        )
        table.add_row(draft_figures.draft, *map(str, counts), f"{share:.0%}", f"{draft_figures.tokens_per_step:.2f}")
    console = Console()
    console.print(f"{figures[0].requests} answers, up to {wanted.width} proposals a step", highlight=False)
    console.print(table)
