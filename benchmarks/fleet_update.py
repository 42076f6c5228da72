"""Updates of the weights of a fleet under load, against servers of each model alone.

`python -m benchmarks.fleet_update [--models demo,other,demo-hybrid,demo] [--streams 3] [--quiet 5]`. A fleet of two
replicas on this machine gets one model after another, by the command that a person would use (`rekindle fleet MODEL
--address`), while requests flow all the time, half of them as streams. `other` is the demo with other weights: the
same configuration and tokenizer, every norm before a layer changed by half. So its rows have the same shapes as the
demo's, and nothing but the identity of the weights keeps them apart.

Every answer is compared with what a server of the same model answers alone: the model of the replica that gave it.
Requests name the model by an alias that all of them have (`--alias`), as clients that shall not notice an update do.

Two long prompts are *reserved*: each model is asked for them when it runs on both replicas. The first replica may
restore nothing of them, although the caches and the shared tier hold their rows of other models. The second one has to
restore what the first has published, and a model that comes back what it had left.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import torch
from attrs import define, field
from safetensors.torch import load_file, save_file

from adapters import demo
from benchmarks.arguments import benchmark_parser
from benchmarks.fleet import (
    CutShortError,
    FleetAnswer,
    ask,
    deploy,
    list_replicas,
    make_body,
    run_program,
    wait_for_others,
    write_text,
)
from benchmarks.results import Figure, Goal, publish
from benchmarks.tables import print_table

OTHER = "other"
ALIAS = "assistant"
PROMPTS = 12
RESERVED = 2
CHANGED = "input_layernorm.weight"
RESERVED_WORDS = 900  # of such a prompt; a short one is computed more quickly than it is restored
SETTLED_READS = 4  # that show the same, half a second apart
SETTLE_S = 300.0  # for runs to reach the shared tier, and for the other replica to see them
SMALL = ("--slots", "4", "--threads", "1", "--max-ctx", "4096", "--kv-cache-min-tokens", "64", "--alias", ALIAS)


def write_other_weights(folder: Path) -> Path:
    """Write the demo with other weights into a folder, and return it."""
    generator = torch.Generator().manual_seed(39)
    for file in demo.FOLDER.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
        elif file.suffix == ".safetensors":
            tensors = load_file(file)
            for name in sorted(tensors):
                if name.endswith(CHANGED):
                    noise = torch.randn(tensors[name].shape, generator=generator)
                    tensors[name] = (tensors[name].float() * (1 + 0.5 * noise)).to(tensors[name].dtype)
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder


def make_prompts(count: int) -> list[dict[str, Any]]:
    """Return bodies of requests. No prompt begins like another one."""
    dice = random.Random(39)
    prompts = list[dict[str, Any]]()
    for number in range(count):
        words = RESERVED_WORDS if number < RESERVED else 120
        system = {"role": "system", "content": f"{number} is your number. {write_text(dice, words)}"}
        messages = [system, {"role": "user", "content": write_text(dice, 30)}]
        prompts.append({**make_body(messages, number), "model": ALIAS, "ignore_eos": True})
    return prompts


async def answer_alone(model: str, prompts: Sequence[dict[str, Any]], folder: Path) -> tuple[str, list[FleetAnswer]]:
    """Return the identity of a server of this model, and what it answers."""
    words = ["serve", model, *SMALL, "--port", "0", "--kv-cache-budget", "0"]
    with run_program(words, folder / "single.log") as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            props = (await client.get("/props")).raise_for_status().json()
            return props["model"]["identity"], [await ask(client, body) for body in prompts]


@define(eq=False)
class UpdateTraffic:
    """Requests that flow while the fleet is updated, and what became of them.

    expected: by the identity of a model, what a server of it answers alone. identities: of the replicas that were seen.
    given: answers with the prompt's number, to be compared when all replicas are known.
    """

    url: str
    prompts: Sequence[dict[str, Any]]
    expected: dict[str, list[FleetAnswer]]
    identities: dict[str, str] = field(factory=dict)
    given: list[tuple[int, FleetAnswer]] = field(factory=list)
    failures: list[str] = field(factory=list)

    async def keep_asking(self, seed: int) -> None:
        """Ask for one prompt after another, until this is cancelled."""
        order = [*range(RESERVED, len(self.prompts))]
        random.Random(seed).shuffle(order)
        async with httpx.AsyncClient(base_url=self.url, timeout=600) as client:
            for number in cycle(order):
                await self.ask(client, number)

    async def keep_watching(self) -> None:
        """Note the replicas that there are, until this is cancelled."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            while True:
                await self.list_replicas(client)
                await anyio.sleep(0.5)

    async def list_replicas(self, client: httpx.AsyncClient) -> list[str]:
        found = await list_replicas(client)
        self.identities |= {one["id"]: one["identity"] for one in found}
        return [one["id"] for one in found]

    async def ask(self, client: httpx.AsyncClient, number: int, replica: str = "") -> FleetAnswer | None:
        """Ask for a prompt, of one replica if it is named. None: it failed, which is noted."""
        client.headers.pop("x-rekindle-replica", None)
        if replica:
            client.headers["x-rekindle-replica"] = replica
        try:
            answer = await ask(client, self.prompts[number])
        except (CutShortError, httpx.HTTPError) as error:
            self.failures.append(repr(error))
            return None
        self.given.append((number, answer))
        return answer

    def count_answers(self) -> Counter[str]:
        """Return how many answers each model gave, by identity, and how many were `different` or of `unknown`
        replicas.
        """
        counts = Counter[str](different=0, unknown=0)
        for number, answer in self.given:
            identity = self.identities.get(answer.replica, "")
            if not identity:
                counts["unknown"] += 1
                continue
            counts[identity] += 1
            counts["different"] += answer.tokens != self.expected[identity][number].tokens
        return counts


@define
class RowsSeen:
    """Tokens of reserved prompts that were restored. strange: although only other models had read the prompt. again: by
    the second replica of a model. back: by the first replica of a model that had been there before.
    """

    strange: int = 0
    again: list[int] = field(factory=list)
    back: list[int] = field(factory=list)


async def check_reserved(traffic: UpdateTraffic, rows: RowsSeen, *, is_back: bool) -> None:
    """Ask one replica for the reserved prompts, then the other one, which restores them from the shared tier."""
    async with httpx.AsyncClient(base_url=traffic.url, timeout=600) as client:
        first, second = (await traffic.list_replicas(client))[:2]
        for number in range(RESERVED):
            answer = await traffic.ask(client, number, first)
            cached = 0 if answer is None else answer.cached
            if is_back:
                rows.back.append(cached)
            else:
                rows.strange += cached
        await wait_until_shared(client, first, second)
        for number in range(RESERVED):
            answer = await traffic.ask(client, number, second)
            rows.again.append(0 if answer is None else answer.cached)


async def wait_until_shared(client: httpx.AsyncClient, writer: str, reader: str) -> None:
    """Wait until one replica has nothing new to write for a while, and the other one has seen everything."""
    with anyio.fail_after(SETTLE_S):
        seen = list[int]()
        while len(seen) < SETTLED_READS:
            figures = await read_shared_figures(client, writer)
            if figures["queued_bytes"] or seen[-1:] != [figures["entries"]]:
                seen = []
            seen.append(figures["entries"])
            await anyio.sleep(0.5)
        while (await read_shared_figures(client, reader))["entries"] < seen[-1]:  # noqa: ASYNC110 - over HTTP
            await anyio.sleep(0.2)


async def read_shared_figures(client: httpx.AsyncClient, replica: str) -> dict[str, int]:
    props = (await client.get("/props", params={"replica": replica})).raise_for_status().json()
    figures: dict[str, int] = props["full_cache"]["shared"]
    return figures


async def update_models(
    traffic: UpdateTraffic, models: Sequence[str], command: Sequence[str], address: str, given: argparse.Namespace
) -> tuple[RowsSeen, list[float]]:
    """Give the fleet one model after another under load. Return what was restored, and the seconds of each update."""
    rows = RowsSeen()
    spent = list[float]()
    await check_reserved(traffic, rows, is_back=False)
    async with anyio.create_task_group() as tasks:
        for seed in range(given.streams):
            tasks.start_soon(traffic.keep_asking, seed)
        tasks.start_soon(traffic.keep_watching)
        for number, (before, model) in enumerate(pairwise(models), 1):
            await anyio.sleep(given.quiet)
            began_s = anyio.current_time()
            async with httpx.AsyncClient(base_url=traffic.url, timeout=60) as client:
                old = set(await traffic.list_replicas(client))
                await deploy([*command[:1], model, *command[1:], "--address", address])
                await wait_for_others(client, old)
            spent.append(anyio.current_time() - began_s)
            print(f"{before} -> {model}: {spent[-1]:.1f} s, {len(traffic.given)} answers so far", flush=True)
            await check_reserved(traffic, rows, is_back=model in models[:number])
        tasks.cancel_scope.cancel()
    return rows, spent


def count_telling_prompts(expected: dict[str, list[FleetAnswer]]) -> int:
    """Return how many prompts no two models answer alike."""
    by_prompt = zip(*expected.values(), strict=True)
    return sum(len({answer.tokens for answer in answers}) == len(expected) for answers in by_prompt)


def run_updates(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything, and return the row of the result."""
    (folder / OTHER).mkdir()
    paths = {OTHER: str(write_other_weights(folder / OTHER))}
    names = given.models.split(",")
    models = [paths.get(name, name) for name in names]
    prompts = make_prompts(PROMPTS)
    expected = dict[str, list[FleetAnswer]]()
    identities = dict[str, str]()
    for name, model in dict(zip(names, models, strict=True)).items():
        identity, answers = anyio.run(answer_alone, model, prompts, folder)
        expected[identity] = answers
        identities[identity] = name
    assert len(expected) == len(set(names)), "two models have one identity"
    telling = count_telling_prompts(expected)
    assert 2 * telling > PROMPTS, f"only {telling} of {PROMPTS} prompts tell the models apart"
    shared = folder / "shared"
    shared.mkdir()
    words = ["fleet", *SMALL, "--port", str(given.port), "--kv-cache-dir", str(folder / "kv")]
    words += ["--kv-shared-tier", shared.as_uri()]
    with run_program([words[0], models[0], *words[1:]], folder / "fleet.log") as (url, address):
        traffic = UpdateTraffic(url, prompts, expected)
        rows, spent = anyio.run(update_models, traffic, models, words, address, given)
    counts = traffic.count_answers()
    by_model = {f"answers_of_{identities[identity]}": counts[identity] for identity in expected}
    return {
        "models": names,
        "prompts": PROMPTS,
        "prompts_answered_differently": telling,
        "answers": len(traffic.given),
        "failed": len(traffic.failures),
        "different": counts["different"],
        "of_unknown_replicas": counts["unknown"],
        **by_model,
        "restored_of_other_models": rows.strange,
        "restored_again": rows.again,
        "restored_when_back": rows.back,
        "update_s": spent,
        "failures": traffic.failures[:5],
    }


def make_figures(row: dict[str, Any]) -> list[Figure]:
    at = f"{' -> '.join(row['models'])}, {row['answers']} answers"
    none = Goal(at_most=0)
    subject = "Fleet, weights updated: "
    return [
        Figure("service", f"{subject}requests that failed", at, "", row["failed"], goal=none),
        Figure("exactness", f"{subject}answers of neither weights alone", at, "", row["different"], goal=none),
        Figure(
            "exactness",
            f"{subject}tokens restored from other weights",
            at,
            "",
            row["restored_of_other_models"],
            goal=none,
        ),
    ]


def update_parser() -> argparse.ArgumentParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", default=f"demo,{OTHER},demo-hybrid,demo", help="one after another")
    parser.add_argument("--streams", type=int, default=3, help="clients that ask all the time")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds under load before each update")
    parser.add_argument("--port", type=int, default=8471)
    return parser


def main() -> None:
    given = update_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = run_updates(given, Path(folder))
    print_table("updates of weights under load", [{key: json.dumps(value) for key, value in row.items()}])
    publish(given, "fleet_update", row, make_figures(row), device="cpu")


if __name__ == "__main__":
    main()
