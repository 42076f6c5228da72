"""A server without HTTP, in a process of its own, that gives the answers it is told to give (`benchmarks.worker`).

The first request loads a `model`, with `draft`, `threads` and `slots`. Each later one is a list of batches, and is
answered with the time they took. A batch has `salt` and `jobs`. A job has a `prompt`, the `answer` that it is made to
give (or none: the model's own) and the number of `tokens`. It may have `speculate`: false turns proposals off for it.
The engine lives as long as the process, so what it learns stays.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from attrs import define, evolve, field

from adapters.device.executor import DeviceExecutor
from adapters.device.sampling.grammar_mask import Matching
from benchmarks.never_slower import together
from benchmarks.worker import serve_requests
from effects.grammar import Grammar
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.serve import freeze_collected
from engine.serving.wiring import Engine, run_engine
from engine.settings.import_order import SWITCH_S
from engine.settings.options import build_options
from engine.tools.bench.forced_answer import ForcedAnswer

FORCED = "forced "  # begins the source of a grammar that stands for an answer


@define
class TextServer:
    """A loaded model with a running engine. answers: of the current batches, by the source of their grammar."""

    portal: BlockingPortal
    stack: ExitStack
    running: Engine | None = None
    vocab: int = 0
    answers: dict[str, Tokens] = field(factory=dict[str, Tokens])

    def measure(self, request: dict[str, Any]) -> Mapping[str, Any]:
        """Answer a request of the parent."""
        if "draft" in request:
            self.load(request)
            return {}
        return self.answer(request["batches"])

    def load(self, request: Mapping[str, Any]) -> None:
        values = {name: request[name] for name in ("model", "draft", "threads", "slots")}
        options = build_options(device="cpu", disk_prefix_cache="off", host_cache_budget=0, **values)
        target: LoadedModel = self.portal.call(load_target, options)
        self.stack.callback(self.portal.call, target.close)
        self.vocab = target.checkpoint.config.vocab_size
        executor = DeviceExecutor(evolve(target.executor.parts, match_grammar=self.match))
        self.running = self.stack.enter_context(
            self.portal.wrap_async_context_manager(run_engine(target.settings, executor))
        )

    def match(self, grammar: Grammar) -> Matching:
        return ForcedAnswer(self.answers[grammar.source], self.vocab)

    def make_job(self, job: Mapping[str, Any], salt: str) -> Job:
        sampling = Sampling()
        if job["answer"]:
            name = f"{FORCED}{len(self.answers)}"
            self.answers[name] = tuple(job["answer"])
            sampling = Sampling(grammar=Grammar("regex", name))
        speculate = job.get("speculate", True)
        return Job(tuple(job["prompt"]), job["tokens"], sampling, scope=Scope("off"), salt=salt, speculate=speculate)

    def answer(self, batches: list[dict[str, Any]]) -> Mapping[str, Any]:
        """Answer one batch after the other. digest: of all answers, so that two servers can be compared."""
        assert self.running is not None
        self.answers.clear()
        asked = [[self.make_job(job, batch["salt"]) for job in batch["jobs"]] for batch in batches]
        freeze_collected()
        took = [self.portal.call(together, self.running, jobs) for jobs in asked]
        return {
            "wall": sum(one.wall for one in took),
            "cpu": sum(one.cpu for one in took),
            "tokens": sum(one.tokens for one in took),
            "decode_steps": sum(one.decode_steps for one in took),
            "digest": hashlib.sha256(json.dumps([one.answers for one in took]).encode()).hexdigest(),
        }


def serve_texts() -> None:
    sys.setswitchinterval(SWITCH_S)  # as a server does
    with start_blocking_portal() as portal, ExitStack() as stack:
        serve_requests(TextServer(portal, stack).measure)


if __name__ == "__main__":
    serve_texts()
