"""Is the planner's split of a restore the best one, and would more readers or larger runs help?

    python -m benchmarks.restore_sweep [--tokens 2048,8160] [--runs 3]          the shipped demo
    python -m benchmarks.restore_sweep --shape 8b --runs 5 --folder DIR         random weights of an 8B model, on CUDA

After a restart, the end of a kept prompt is loaded while its beginning is computed (`policy.choose_load_start`).
For each size of runs (the files that rows are kept in), one server computes the prompts, keeps them on disk, and is
killed. Then each figure is the first long request of a process of its own, with the files out of the page cache: as
the planner splits it, with forced splits around that, with everything loaded or computed, and with other numbers of
readers. Each number of readers has its own measured rates, so the planner knows what they bring. Variants take turns,
run by run.

The choice is confirmed if no variant is quicker by more than the noise, which is how far the planner's own runs are
from their median. Answers must have the same token and log-probabilities as those that were computed cold: the exit
status is 1 if any has not. The servers are ours but for the forced numbers (`serve`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
from attrs import define, field, frozen

from benchmarks.arguments import benchmark_parser
from benchmarks.cold import forget, read_raw
from benchmarks.first_requests import SHAPES, TOKENS, ask, checkpoint, listening, wait_until_written
from benchmarks.results import Figure, Goal, name_shape, publish
from benchmarks.tables import median, print_table

PLANNER = "planner"
LEAST_NOISE = 0.03  # of a time: three runs may agree by chance


@frozen
class Variant:
    """The numbers that are forced on a server. None: as it decides itself.

    share: of the restorable rows that are computed. readers: runs that are read at once. run_factor: how many times as
    long the files are.
    """

    share: float | None = None
    readers: int | None = None
    run_factor: int = 1

    @property
    def name(self) -> str:
        forced = {
            "split": None if self.share is None else f"compute {100 * self.share:.0f} %",
            "readers": None if self.readers is None else f"{self.readers} readers",
            "runs": None if self.run_factor == 1 else f"{self.run_factor}x runs",
        }
        return ", ".join(filter(None, forced.values())) or PLANNER

    @property
    def home(self) -> str:
        """The folder of its rates: what loading takes depends on these two."""
        return f"home-{self.readers or 0}-{self.run_factor}"


def serve(variant: Variant, words: Sequence[str]) -> None:
    """Run `rekindle serve` with forced numbers.

    Other modules take them over when they are imported, so they are set in the first one before that.
    """
    from adapters.store import store  # noqa: PLC0415 - before everything that takes its numbers over

    if variant.readers is not None:
        store.RUNS_IN_FLIGHT = variant.readers
    store.RUN_BYTES *= variant.run_factor
    from adapters.store import open_store  # noqa: PLC0415

    open_store.GPU_RUN_BYTES *= variant.run_factor
    open_store.MOVING_RUNS = max(open_store.MOVING_RUNS, store.RUNS_IN_FLIGHT)
    from engine.__main__ import main as rekindle  # noqa: PLC0415
    from states import policy  # noqa: PLC0415
    from states.settings import Settings  # noqa: PLC0415

    share = variant.share

    def choose_forced(settings: Settings, _: object, start: int, stop: int, *__: object) -> int:
        assert share is not None
        rows = int((stop - start) * share) // settings.block_size * settings.block_size
        return start + rows if share < 1 else stop

    if share is not None:
        policy.choose_load_start = choose_forced
    sys.argv = ["rekindle", "serve", *words]
    rekindle()


ALL_LOADED = Variant(share=0.0)


@define
class Sweep:
    """One sweep: the prompts, their cold answers, and every figure so far. words: the options of all servers."""

    folder: Path
    words: list[str]
    prompts: list[list[int]]
    found: list[dict[str, Any]] = field(factory=list)
    cold: dict[int, Any] = field(factory=dict)
    files: dict[tuple[int, int], list[Path]] = field(factory=dict)  # by run factor and tokens

    @contextmanager
    def start(self, variant: Variant) -> Iterator[tuple[httpx.Client, Popen[str], float]]:
        home = self.folder / variant.home
        home.mkdir(exist_ok=True)
        forced = json.dumps([variant.share, variant.readers, variant.run_factor])
        words = [sys.executable, "-m", "benchmarks.restore_sweep", "serve", forced, "--port", "0", *self.words]
        with listening([*words, "--kv-cache-dir", str(self.cache_of(variant.run_factor))], home) as found:
            yield found

    def cache_of(self, run_factor: int) -> Path:
        return self.folder / f"kv-{run_factor}"

    def write(self, run_factor: int) -> None:
        """Compute all prompts cold, keep them, and kill the server."""
        cache = self.cache_of(run_factor)
        with self.start(Variant(run_factor=run_factor)) as (client, process, _):
            ask(client, draw_prompt(100, 0))  # what is only done once in a process
            for prompt in self.prompts:
                before = set(cache.glob("*.zst"))
                answer, seconds = ask(client, prompt)
                self.cold[len(prompt)] = answer["choices"]
                wait_until_written(client, len(before))
                self.files[run_factor, len(prompt)] = sorted(set(cache.glob("*.zst")) - before)
                self.add(Variant(run_factor=run_factor), "cold", prompt, answer, seconds)
            process.kill()
            process.wait(30)

    def measure(self, variant: Variant, prompt: Sequence[int]) -> int:
        """Ask a new process for a kept prompt. Returns the number of tokens that it restored."""
        with self.start(variant) as (client, _, _):
            ask(client, draw_prompt(100, 0))
            forget(self.files[variant.run_factor, len(prompt)])
            answer, seconds = ask(client, prompt)
        return self.add(variant, variant.name, prompt, answer, seconds)

    def add(self, variant: Variant, name: str, prompt: Sequence[int], answer: dict[str, Any], seconds: float) -> int:
        restored = int(answer["rekindle"]["restored_tokens"])
        same = answer["choices"] == self.cold[len(prompt)]
        row = {"variant": name, "runs": variant.run_factor, "tokens": len(prompt), "seconds": seconds}
        self.found.append(row | {"restored": restored, "same": same})
        print(json.dumps(self.found[-1]), flush=True)
        return restored

    def summarise(self, tokens: int) -> list[dict[str, Any]]:
        """Return a row for each variant of one length, the planner's first."""
        planner = self.times_of(PLANNER, tokens)
        chosen = median(planner)
        noise = max(LEAST_NOISE, *(abs(time - chosen) / chosen for time in planner))
        names = dict.fromkeys(one["variant"] for one in self.found if one["tokens"] == tokens)
        rows = list[dict[str, Any]]()
        for name in sorted(names, key=lambda name: name != PLANNER):
            times = self.times_of(name, tokens)
            restored = median(
                one["restored"] for one in self.found if (one["variant"], one["tokens"]) == (name, tokens)
            )
            row = {"tokens": tokens, "variant": name, "restored": restored, "seconds": median(times)}
            quicker = name != PLANNER and median(times) < chosen * (1 - noise)
            rows.append(row | {"to planner": median(times) / chosen, "noise": noise, "quicker": quicker})
        return rows

    def times_of(self, variant: str, tokens: int) -> list[float]:
        return [one["seconds"] for one in self.found if (one["variant"], one["tokens"]) == (variant, tokens)]


def draw_prompt(tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 4000) for _ in range(tokens)]


def list_variants(restored: int, restorable: int, given: argparse.Namespace) -> list[Variant]:
    """List what is compared with the planner, which restored so many of the tokens that could be restored."""
    chosen = 1 - restored / restorable
    steps = [chosen + step * given.step for step in (-2, -1, 1, 2)]
    shares = sorted({1.0, *(round(share, 3) for share in steps if 0 < share < 1)})
    variants = [Variant(), ALL_LOADED, *(Variant(share=share) for share in shares)]
    variants += [Variant(readers=int(readers)) for readers in given.readers.split(",")]
    return variants + [Variant(run_factor=factor) for factor in parse_factors(given) if factor != 1]


def parse_factors(given: argparse.Namespace) -> list[int]:
    return sorted({1, *map(int, given.run_factors.split(","))})


def make_figures(rows: Sequence[dict[str, Any]], shape: str) -> list[Figure]:
    """Compare the planner's choice with the quickest variant of each length."""
    figures = list[Figure]()
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        [planner, *others] = [row for row in rows if row["tokens"] == tokens]
        best = min((row["seconds"] for row in others if row["variant"] != "cold"), default=planner["seconds"])
        goal = Goal(at_most=1 + planner["noise"], against="best forced")
        subject = f"{name_shape(shape)}, split of a restore"
        figures.append(Figure("restart", subject, str(tokens), "s", planner["seconds"], {"best forced": best}, goal))
    return figures


def parse_options() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--layers", type=int, default=0, help="other than the shape has")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", default="0")
    parser.add_argument("--tokens", default="")
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--runs", type=int, default=3, help="of each variant")
    parser.add_argument("--step", type=float, default=0.1, help="share of the rows between two forced splits")
    parser.add_argument("--readers", default="2,4,16", help="in addition to its own number")
    parser.add_argument("--run-factors", default="2", help="of the length of runs")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    given = parser.parse_args()
    given.tokens = given.tokens or TOKENS[given.shape]
    return given


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        serve(Variant(*json.loads(sys.argv[2])), sys.argv[3:])
        return 0
    given = parse_options()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        model = "demo" if given.shape == "demo" else str(checkpoint(folder / "model", given))
        words = ["--model", model, "--device", given.device, "--threads", given.threads, "--host-cache-budget", "0"]
        words += ["--kv-cache-budget", "40000", "--kv-cache-codec", given.codec]
        prompts = [draw_prompt(int(size), 1 + at) for at, size in enumerate(given.tokens.split(","))]
        sweep = Sweep(folder, words, prompts)
        for factor in parse_factors(given):
            sweep.write(factor)
        variants = dict[int, list[Variant]]()
        for prompt in prompts:  # once before all, since forced splits lie around the planner's
            restored, restorable = sweep.measure(Variant(), prompt), sweep.measure(ALL_LOADED, prompt)
            variants[len(prompt)] = list_variants(restored, restorable, given)
        for run in range(given.runs):
            for prompt in prompts:
                for variant in variants[len(prompt)][0 if run else 2 :]:
                    sweep.measure(variant, prompt)
        files = [file for (factor, _), group in sweep.files.items() if factor == 1 for file in group]
        forget(files)
        read, seconds = read_raw(files)
    rows = [row for prompt in prompts for row in sweep.summarise(len(prompt))]
    print_table("Seconds until the first token of a kept prompt in a new process; medians", rows)
    quicker = [f"{row['variant']} at {row['tokens']}" for row in rows if row["quicker"] and row["variant"] != "cold"]
    print(f"the planner's choice was {'not the best: ' + '; '.join(quicker) if quicker else 'the best within noise'}")
    raw = {"medians": rows, "samples": sweep.found, "raw_GB_s": read / seconds / 1e9}
    publish(given, f"restore_sweep-{given.shape}", raw, make_figures(rows, given.shape), given.device)
    changed = [f"{one['variant']} at {one['tokens']}" for one in sweep.found if not one["same"]]
    if changed:
        print(f"other answers than cold: {', '.join(changed)}", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
