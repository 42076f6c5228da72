"""Measures the promise that the same request has the same tokens. It compares answers with and without speculation,
cold and restored from each tier, and batched. It compares them with a draft that stays or one that comes and goes, and
with copies of earlier text as chains and as trees. Others are served together with requests that share a head and
leave, or executed again from a trace.

`python -m benchmarks.exactness [--prompts 1000] [--device cpu] [--dtype auto] [--kv-dtype auto] [--draft auto]
[--only cold,trees,followers,...] [--slots 4] [--logprobs 8] [--digests] [--skip 0] [--seed 0]
[--family gpt_oss] [--gguf Q8_0] [--quantize int8] [--unpack auto] [--cpu-experts 2] [--longest 700] [--answer 48]`

`--family` measures a small random checkpoint of that family (`benchmarks.family_checkpoints`) with a random DFlash
draft. `--draft eagle3` takes a random EAGLE-3 draft instead, for GLM `--draft mtp` its own prediction head, and
for Gemma 4 `--draft assistant` an assistant. For the demos `--draft` also takes the kinds of `benchmarks.demo_drafts`:
dflash, dflash2, dspark, gguf, eagle3, and `eagle3+suffix` for one beside copies. With `--gguf Q8_0` it is a GGUF file
with weights of that type.
`distinct` is the share of different tokens in an answer, the mean of all. Answers that repeat one token would hide
faults, so a share below a quarter is an error.

Prompts are code, tool calls, chat and retrieval in turn. Half of them are greedy, and half are sampled by a seed.
Everything is compared with answers that are computed cold, alone and without a draft. Tokens are always compared. With
`--logprobs` the log-probabilities of so many alternatives of each token are compared too, bit for bit, and with
`--digests` all logits: a result then says how many `rows` were picked from, and how many of them are `missing`
elsewhere. Rows from disk were written by a process that was killed (`kill -9`). `followed` counts prompt tokens that
another request computed at the same time. --seed draws which requests share which head, and which of them leave
(`benchmarks.exactness_followers`). --skip and --prompts choose a slice of all prompts, so a long campaign can run in
parts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from attrs import define, evolve, field

from adapters.models.kernels.proof import prover
from adapters.store.disk.disk_tier import DiskTier
from adapters.text.model_text import Text
from benchmarks.arguments import benchmark_parser
from benchmarks.demo_drafts import KINDS as DEMO_DRAFTS
from benchmarks.demo_drafts import save_demo_draft
from benchmarks.exactness_followers import answer_among_companions
from benchmarks.family_checkpoints import FAMILIES, save_family
from benchmarks.listening import Listening
from benchmarks.results import Figure, Goal, publish, slug
from benchmarks.subjects import NAMES
from benchmarks.subjects import prompts as held_out_prompts
from benchmarks.tables import print_table
from effects.decode import MATCH_CLASSES, Logprob
from effects.ids import Tokens
from effects.job import Job, Report, Sampling
from effects.ports import Closed
from effects.scope import Scope
from effects.stream import EmitTokens
from engine import __version__
from engine.core.trace import VERSION, Header, Recorder
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.re_execute import execute
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import Options, build_options, evolve_options
from engine.settings.paths import find_model_folder
from states.rates import ClassGains, Rates, TimedStep
from states.residency import resolve_residency
from states.speculation_control import SERVER_MEMORY
from states.step_prices import UNIT
from states.suffix_control import list_copy_widths

ANSWER = 48  # tokens
LONGEST = 700  # tokens of a prompt
SAMPLED = Sampling(temperature=0.8, top_p=0.95)
OFF, FULL = Scope("off"), Scope("full")
TREE = 22
FREE = (TimedStep(0, 1, 0, 1000, 0), TimedStep(0, 1, 32, 1001, 1000))  # steps of which the widest cost no more
LEAST_DISTINCT = 0.25  # of the tokens of an answer; fewer would say little


async def prompts(text: Text, count: int) -> list[Tokens]:
    """Code, chat, tables and long listings, 20 to 4,000 tokens; a mixture that the demo was made for."""
    rng = random.Random(0)
    made = list[Tokens]()
    for n in range(count):
        kind = n % 4
        if kind == 0:
            source = f"def function_{n}(items):\n" + "".join(
                f"    total_{k} = items[{k}] + {rng.randrange(99)}\n" for k in range(n % 60)
            )
            made.append((await text.tokenizer.encode([source]))[0])
        elif kind == 1:
            question = f"What is {rng.randrange(50)} + {rng.randrange(50)}? " + "Please think about it. " * (n % 30)
            made.append(await text.encode_chat([{"role": "user", "content": question}]))
        elif kind == 2:
            pairs = [f"key {rng.randrange(1000)} -> {rng.randrange(1000)}" for _ in range(10 + n % 200)]
            made.append(
                await text.encode_chat([{"role": "user", "content": "\n".join([*pairs, f"What is {pairs[3][:8]}?"])}])
            )
        else:
            listing = "\n".join(f"value_{k} = {rng.randrange(10_000)}" for k in range(5 + n % 300))
            made.append((await text.tokenizer.encode([listing]))[0])
    return [prompt[-4000:] for prompt in made]


@define
class Answered:
    """The tokens of a job, their log-probabilities if it asked for them, and what became of it."""

    tokens: Tokens = ()
    logprobs: tuple[Logprob, ...] = ()
    report: Report | None = None


async def collect_answer(running: Engine, job: Job) -> Answered:
    found = Answered()
    async for message in running.submissions.submit(job):
        if isinstance(message, EmitTokens):
            found.tokens += message.tokens
            found.logprobs += message.logprobs
        elif isinstance(message, Closed):
            found.report = message.report
    return found


async def answer(running: Engine, job: Job) -> tuple[Tokens, int]:
    """The tokens of a job, and how much of its prompt was restored."""
    found = await collect_answer(running, job)
    assert found.report is not None
    return found.tokens, found.report.restored_tokens


async def each_cold(target: LoadedModel, jobs: Sequence[Job]) -> list[Tokens]:
    """Answer every job in a world of its own: it has no rows to continue from, and no other request is served."""
    answers = list[Tokens]()
    for job in jobs:
        async with run_engine(target.settings, target.executor) as running:
            tokens, restored = await answer(running, job)
            assert restored == 0
            answers.append(tokens)
    return answers


async def each_continued(target: LoadedModel, jobs: Sequence[Job], restored: list[int]) -> list[Tokens]:
    """Every job after one that shares two thirds of its prompt."""
    answers = list[Tokens]()
    async with run_engine(target.settings, target.executor) as running:
        for job in jobs:
            await answer(running, evolve(job, prompt=job.prompt[: max(1, len(job.prompt) * 2 // 3)], max_tokens=3))
            tokens, kept = await answer(running, job)
            answers.append(tokens)
            restored.append(kept)
    return answers


async def each_batched(target: LoadedModel, jobs: Sequence[Job], recorder: Recorder | None) -> list[Tokens]:
    """Four at a time."""
    return [one.tokens for one in await together(target, jobs, recorder=recorder)]


async def together(
    target: LoadedModel, jobs: Sequence[Job], *, at_once: int = 4, recorder: Recorder | None = None, **settings: Any
) -> list[Answered]:
    """Answer the jobs in one world, so many at a time, with the target's store if it has one."""
    found = [Answered()] * len(jobs)

    async def one(number: int) -> None:
        found[number] = await collect_answer(running, jobs[number])

    changed = evolve(target.settings, **settings)
    async with run_engine(changed, target.executor, transfer=target.transfer, recorder=recorder) as running:
        for start in range(0, len(jobs), at_once):
            async with anyio.create_task_group() as tasks:
                for number in range(start, min(start + at_once, len(jobs))):
                    tasks.start_soon(one, number)
    return found


# --- what is compared ---


def compute_distinct_share(answers: Sequence[Answered]) -> float:
    """Return the share of different tokens in an answer, the mean over all answers that have tokens."""
    shares = [len(set(one.tokens)) / len(one.tokens) for one in answers if one.tokens]
    return round(sum(shares) / max(1, len(shares)), 2)


@define(eq=False)
class Comparison:
    """Answers compared with the plain ones, and what the reports say."""

    target: LoadedModel
    jobs: list[Job]
    folder: Path
    plain: list[Answered]
    rows: list[dict[str, Any]]
    listening: Listening | None = None
    said: Counter[tuple[int, str]] = field(factory=Counter)
    """Where each of the plain answers' rows of logits is, and its digest."""
    seed: int = 0  # of the requests that share heads with the jobs
    companions: Counter[str] = field(factory=Counter[str])

    async def run(self, name: str, work: Callable[[], Awaitable[list[Answered]]]) -> None:
        start = time.monotonic()
        found = await work()
        reports = [one.report for one in found if one.report is not None]
        tiers = {report.tier for report in reports if report.restored_tokens}
        row = {
            "how": name,
            "jobs": len(found),
            "differing": sum(
                (one.tokens, one.logprobs) != (other.tokens, other.logprobs)
                for one, other in zip(found, self.plain, strict=True)
            ),
            "tokens": sum(len(one.tokens) for one in found),
            "distinct": compute_distinct_share(found),
            "rounds": sum(report.decode_steps for report in reports),
            "proposed": sum(report.proposed for report in reports),
            "accepted": sum(report.accepted for report in reports),
            "restored": sum(report.restored_tokens for report in reports),
            "followed": sum(report.followed_tokens for report in reports),
            "tier": ",".join(sorted(tiers)) or "none",
            "seconds": round(time.monotonic() - start, 1),
        }
        if (
            self.listening is not None
        ):  # some rows are computed again, those of prompts, or of what is refused at an end
            row |= {"rows": self.said.total(), "missing": (self.said - Counter(self.listening.taken())).total()}
        self.rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    # Every mode: the same jobs, done differently.

    async def cold(self) -> list[Answered]:
        found = list[Answered]()
        for job in self.jobs:
            found += await together(self.target, [job])
        return found

    async def batched(self) -> list[Answered]:
        return await together(self.target, self.jobs, at_once=self.target.settings.slots)

    async def trees(self) -> list[Answered]:
        """Answer with trees. The measured times say that the largest ones cost no more than a plain step, so all steps
        have one.
        """
        return await together(
            self.target,
            self.jobs,
            tree=TREE,
            rates=Rates(decode=FREE),
        )

    async def copies(self) -> list[Answered]:
        """Answer with copies. The measured times say that the longest chains cost no more than a plain step."""
        return await together(self.target, self.jobs, rates=Rates(decode=FREE[:1], copy_times=FREE[1:]), max_branch=0)

    async def branches(self) -> list[Answered]:
        """Answer with trees of copies. The measured times say that they cost no more either, and branches seem to be
        right often.
        """
        widths = list_copy_widths(self.target.settings)
        often = ClassGains(SERVER_MEMORY, tuple(UNIT * width // 2 for width in widths), 8 * UNIT)
        rates = Rates(decode=FREE[:1], copy_times=FREE[1:], branch_times=FREE[1:], copied=(often,) * len(MATCH_CLASSES))
        return await together(self.target, self.jobs, rates=rates)

    async def continued(self) -> list[Answered]:
        """Each after one that shares two thirds of its prompt, in the slots."""
        found = list[Answered]()
        async with run_engine(self.target.settings, self.target.executor) as running:
            for job in self.jobs:
                begun = evolve(job, prompt=job.prompt[: max(1, len(job.prompt) * 2 // 3)], max_tokens=3)
                await collect_answer(running, begun)
                found.append(await collect_answer(running, job))
        return found

    async def scoped(self) -> list[Answered]:
        """Answer with a draft that is parked whenever no request needs it."""
        target = self.target
        assert target.draft is not None
        residency, _ = resolve_residency("request-scoped", has_draft=True, has_prompt_scorer=False)
        await target.lane.run(target.draft.offload)
        try:
            return await together(target, self.jobs, residency=residency)
        finally:
            await target.lane.run(target.draft.load_back)

    async def run_silent(self, name: str, work: Callable[[], Awaitable[list[Answered]]]) -> None:
        """Do the same with jobs that want no draft."""
        jobs = self.jobs
        self.jobs = [evolve(job, speculate=False) for job in jobs]
        await self.run(f"{name}, without a draft", work)
        self.jobs = jobs

    async def restored(self) -> list[Answered]:
        """Beyond the device: the slots are empty, and everything was kept before. It is brought back, whatever that is
        worth: what it took is forgotten.
        """
        jobs, found = [evolve(job, scope=FULL) for job in self.jobs], list[Answered]()
        trusted = evolve(self.target.settings.rates, loads={})
        for start in range(0, len(jobs), 4):
            found += await together(self.target, jobs[start : start + 4], rates=trusted)
        return found

    async def followers(self) -> list[Answered]:
        """Beside others that begin together with each and have the same head. Some of these leave."""
        found, self.companions = await answer_among_companions(self.target, self.jobs, self.seed, collect_answer)
        print(f"companions: {dict(self.companions)}", flush=True)
        followed = sum(one.report.followed_tokens for one in found if one.report is not None)
        assert followed, "no request followed another, so nothing was compared"
        return found


MODES = (
    *("cold", "batched", "continued", "trees", "scoped", "copies", "branches"),
    *("followers", "host", "disk", "silent", "executed"),
)


def draw_prompts(count: int, longest: int, skip: int = 0) -> list[Tokens]:
    """Return prompts of every kind in turn, without the first ones."""
    by_kind = held_out_prompts(list(NAMES), -(-(skip + count) // len(NAMES)), longest)
    mixed = [prompt for row in zip(*by_kind.values(), strict=True) for prompt in row]
    return mixed[skip : skip + count]


def make_jobs(
    drawn: Sequence[Tokens], ends: Tokens, skip: int = 0, logprobs: int = -1, answer: int = ANSWER
) -> list[Job]:
    """Return a job for each prompt: of every kind the first one greedy, the next one sampled, and so on.

    skip: prompts of the campaign before these.
    """
    ways = Sampling(logprobs=logprobs), evolve(SAMPLED, logprobs=logprobs)
    return [
        Job(prompt, answer, evolve(ways[n // len(NAMES) % 2], seed=n), ends, OFF)
        for n, prompt in enumerate(drawn, skip)
    ]


def make_random_jobs(count: int, ends: Tokens) -> list[Job]:
    return make_jobs(draw_prompts(count, LONGEST), ends)


async def leave(options: Options, jobs: Sequence[Job]) -> None:
    """Answers them and is killed, once the last answer is on disk."""
    target = await load_target(options)
    await together(target, [evolve(job, scope=FULL) for job in jobs])
    assert target.transfer is not None
    disk = target.transfer.store.find_tier(DiskTier)
    assert disk is not None
    while disk.queued_bytes:  # noqa: ASYNC110 - the disk announces no changes
        await anyio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@define
class Measured:
    """The result of all ways. facts: what else is recorded. differing: how many answers and rows of logits differ."""

    rows: list[dict[str, Any]]
    facts: dict[str, Any]
    differing: int


# What a process needs to know that leaves its rows behind.
PASSED_ON = (
    *("model", "draft", "device", "threads", "dtype", "kv_dtype", "quantize", "cpu_experts", "slots"),
    "unpack",
    *("prompts", "skip", "logprobs", "longest", "answer"),
)


async def run_killed(given: argparse.Namespace, drawn: Sequence[Tokens], folder: Path) -> None:
    """Answer the prompts in a process that is killed when all rows are in files below `folder`."""
    asked = folder.with_suffix(".json")
    asked.write_text(json.dumps(drawn))
    arguments = [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in PASSED_ON]
    words = [sys.executable, "-m", "benchmarks.exactness", *arguments, f"--asked={asked}", f"--leave={folder}"]
    ended = await anyio.run_process(words, check=False, stderr=None)
    assert ended.returncode == -signal.SIGKILL, ended.returncode


def read_prompts(given: argparse.Namespace) -> list[Tokens]:
    """Return the prompts of --asked, or else draw them, which takes half a minute of two processes."""
    if given.asked is None:
        return draw_prompts(given.prompts, given.longest, given.skip)
    return [tuple(prompt) for prompt in json.loads(given.asked.read_text())]


async def run_ways(options: Options, given: argparse.Namespace) -> Measured:
    modes = given.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = {"kv_cache_min_tokens": 0, "host_cache_budget": 4096}
        killed = evolve_options(
            options, **shape | {"kv_cache_dir": given.leave or folder / "killed", "host_cache_budget": 0}
        )
        text = Text.load(find_model_folder(options.model))
        drawn = read_prompts(given)
        jobs = make_jobs(drawn, tuple(text.tokenizer.end_tokens), given.skip, given.logprobs, given.answer)
        await text.aclose()
        if given.leave:
            await leave(killed, jobs)
        target = await load_target(evolve_options(options, **shape, kv_cache_dir=folder / "kv"))
        heard = Listening(target) if given.digests else None
        compared = Comparison(target, jobs, folder, [], [], heard, seed=given.seed)
        silent = [evolve(job, speculate=False) for job in jobs]
        compared.plain = await together(target, silent, at_once=1)
        assert compute_distinct_share(compared.plain) >= LEAST_DISTINCT, "answers repeat the same few tokens"
        if compared.listening is not None:
            compared.said = Counter(compared.listening.taken())
        await compare(compared, modes)
        executed = await again(compared, options) if "executed" in modes else {}
        await target.close()
        if "disk" in modes:
            assert killed.cache.kv_cache_dir is not None
            await run_killed(given, drawn, Path(killed.cache.kv_cache_dir))
            compared.target = await load_target(killed)
            compared.listening = Listening(compared.target) if given.digests else None
            await compared.run("from disk, of a process that was killed", compared.restored)
            if "silent" in modes and proposes(compared.target):
                await compared.run_silent("from disk", compared.restored)
            await compared.target.close()
    print_table("Exactness: against answers that were computed cold, alone and without a draft", compared.rows)
    where = {"numerics": {"mode": target.mode, **target.numerics.build_report()}, "draft": target.draft is not None}
    where |= {"kv_dtype": target.details.kv_dtype, "logprobs": given.logprobs, "companions": compared.companions}
    facts = {"prompt_tokens": sum(len(job.prompt) for job in jobs), **where, **executed}
    differing = sum(row["differing"] + row.get("missing", 0) for row in compared.rows)
    return Measured(compared.rows, facts, differing + executed.get("differing", 0))


async def measure(options: Options, given: argparse.Namespace) -> int:
    found = await run_ways(options, given)
    kinds = [kind for kind in (given.dtype, given.kv_dtype, given.quantize) if kind not in ("auto", "none")]
    kinds += [f"{given.gguf} in GGUF"] if given.gguf else []
    kinds += [] if given.family or given.kind == "auto" else [given.kind]
    kinds += [] if given.cpu_experts == "auto" else [f"{given.cpu_experts} layers' experts on the CPU"]
    subject = ", ".join([Path(given.model).stem, *kinds])
    name = "-".join(["exactness", slug(subject)])
    publish(given, name, {"rows": found.rows, **found.facts}, [make_figure(found.rows, subject)], given.device)
    return found.differing


def make_figure(rows: Sequence[Mapping[str, Any]], subject: str) -> Figure:
    """Make one figure of all ways: how many answers differ from the plain ones."""
    count, differing = sum(row["jobs"] for row in rows), sum(row["differing"] for row in rows)
    return Figure("exactness", subject, f"{len(rows)} ways", f"of {count:,} differ", differing, goal=Goal(at_most=0))


def proposes(target: LoadedModel) -> bool:
    """Return whether the target has a draft, or copies earlier text."""
    return target.draft is not None or target.settings.max_copied > 0


async def compare(compared: Comparison, modes: Sequence[str]) -> None:
    ways = {
        "cold": ("cold and alone", compared.cold),
        "batched": (f"batched by {compared.target.settings.slots}", compared.batched),
        "continued": ("continued in a slot", compared.continued),
        "trees": (f"trees of {TREE}", compared.trees),
        "scoped": ("request-scoped draft", compared.scoped),
        "copies": ("copies as chains", compared.copies),
        "branches": ("copies as trees", compared.branches),
        "followers": ("beside others of the same head", compared.followers),
    }
    if compared.target.draft is None:
        ways = {mode: way for mode, way in ways.items() if mode not in {"trees", "scoped"}}
    elif compared.target.shard.states.tree_obstacle:
        ways.pop("trees")  # it would verify chains
    if not compared.target.settings.max_copied:
        ways = {mode: way for mode, way in ways.items() if mode not in {"copies", "branches"}}
    elif not compared.target.settings.max_branch:
        ways.pop("branches")
    for mode, (name, work) in ways.items():
        if mode in modes:
            await compared.run(name, work)
    if "host" in modes:
        await compared.run("cold, and kept", compared.restored)
        await compared.run("from host memory", compared.restored)
    if "silent" in modes and proposes(compared.target):
        await compared.run_silent(*ways["batched"])
        if "host" in modes:
            await compared.run_silent("from host memory", compared.restored)


async def again(compared: Comparison, options: Options) -> dict[str, Any]:
    """The batched run, executed again from its trace: without a draft."""
    trace, target = compared.folder / "batched.jsonl.zst", compared.target
    header = Header(VERSION, __version__, target.settings, target.identity, options.redacted_values())
    recorder = Recorder(trace, header)
    recorder.start()
    at_once = target.settings.slots
    work = partial(together, target, compared.jobs, at_once=at_once, recorder=recorder)
    await compared.run(f"batched by {at_once}, recorded", work)
    run, tokens = await execute(trace, options.model.model)
    print(f"executed again: {run.events} events, {tokens} tokens, 0 differing")
    return {"executed": {"events": run.events, "tokens": tokens}}


def make_parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--skip", type=int, default=0, help="prompts: so that several processes can share the work")
    parser.add_argument("--seed", type=int, default=0, help="of the requests that share heads with these and leave")
    parser.add_argument("--slots", type=int, default=4, help="requests of a batch")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a prompt at most")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--cpu-experts", default="auto", help="layers whose experts the host computes")
    parser.add_argument(
        "--unpack", default="auto", choices=["auto", "never"], help="never: a CPU multiplies packed weights as they are"
    )
    parser.add_argument("--family", default="", choices=["", *FAMILIES])
    parser.add_argument("--gguf", default="", help="the type of weights of a GGUF file that --family becomes")
    parser.add_argument("--only", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--logprobs", type=int, default=-1, help="compared as well, of so many alternatives a token")
    parser.add_argument("--digests", action="store_true", help="all logits are compared as well")
    parser.add_argument("--leave", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--asked", type=Path, help=argparse.SUPPRESS)
    return parser


def prepare(given: argparse.Namespace, folder: Path) -> Options:
    """Write the checkpoint of --family below `folder`, if there is one, and return the options to load the model."""
    if given.unpack == "never":
        prover.MAY_UNPACK = False
    given.kind = Path(given.draft).stem
    kind, plus, copies = given.draft.partition("+")
    if not given.family and kind in DEMO_DRAFTS:
        given.draft = f"{save_demo_draft(kind, given.model, folder)}{plus}{copies}"
    if given.family:
        model, draft = save_family(given.family, folder, given.draft, given.gguf)
        given.model = str(model)
        given.draft = given.draft if given.draft in ("none", "mtp") else str(draft)
    where = {"device": given.device, "threads": given.threads}
    kinds = {"dtype": given.dtype, "kv_dtype": given.kv_dtype, "quantize": given.quantize}
    kinds["cpu_experts"] = given.cpu_experts
    return build_options(model=given.model, draft=given.draft, **where, **kinds, slots=given.slots)


def main() -> int:
    given = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = prepare(given, Path(folder))
        return 1 if anyio.run(measure, options, given) else 0


if __name__ == "__main__":
    raise SystemExit(main())
