"""Answers of a server in every arrangement of the covering array, compared with those of a plain one.

    python -m tests.campaign.covering [--seed 0] [--rows 0-35] [--requests 40] [--limit SECONDS] [--json FILE]

Each row is a server that is started as it says and has three clients at once. They share prompts, edit them, leave, ask
for several answers, for forms and for penalties. The server is killed (`kill -9`) in the middle and started again on
what it has kept; shards in processes of their own are killed, too. Every answer is compared, with the log-probabilities
of its tokens, with that of a plain server: one slot, no cache, no draft, nothing compressed. Where the answer says that
parts of its prompt were left out, the plain server is asked with what was kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import httpx
from attrs import asdict, define, field

from adapters import demo
from benchmarks.results import describe_machine
from benchmarks.tables import print_table
from engine.settings.shard_secret import VARIABLE
from tests.campaign.arrangements import Arrangement, arrangements
from tests.campaign.case import quiet
from tests.campaign.mixture import PLAIN, MixedRequest, drawn
from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.e2e.test_families import DRAFT, FAMILIES, HIDDEN, LAYERS, VOCAB
from tests.e2e.test_remote_shard import WORDS, listening
from tests.models.checkpoints import save_model
from tests.models.draft_models import random_tensors, save_draft
from tests.models.ggufs import write_gguf
from tests.plain_http import NO_TLS

CLIENTS, CONTEXT = 3, 1024
POOL_PAGES = {"tight": 5, "wide": 11}
# KiB of a row's keys and values as float32, by family: layers that attend, two, heads, their width, four bytes.
ROW_KIB = {"demo": 5.0, "demo-hybrid": 1.0, "llama": 1.5, "qwen2": 1.5, "qwen3_moe": 1.5, "qwen3_next": 0.5}

Told: TypeAlias = dict[str, Any]
Spans: TypeAlias = tuple[tuple[int, int], ...]


@define
class Models:
    """Checkpoints of all families, written when they are first wanted."""

    folder: Path
    _made: dict[str, Path] = field(factory=dict[str, Path])

    def path(self, row: Arrangement) -> str:
        family = row["family"]
        if row["weights"] == "gguf":
            return str(self._once("gguf", self._gguf))
        if family in demo.FOLDERS:
            return family
        return str(self._once(family, lambda folder: self._random(folder, family)))

    def draft(self, row: Arrangement) -> str:
        if row["draft"] == "none":
            return "none"
        if row["family"] == "demo":
            return str(demo.FOLDERS["demo"] / "draft")
        return "auto" if row["family"] in demo.FOLDERS else str(self._once("draft", self._draft))

    def _once(self, name: str, make: Any) -> Path:
        if name not in self._made:
            self._made[name] = make(self.folder / name)
        return self._made[name]

    def _gguf(self, path: Path) -> Path:
        from gguf import GGMLQuantizationType as Kind  # noqa: PLC0415 - for the few rows that want one

        return write_gguf(path.with_suffix(".gguf"), demo.FOLDER, Kind.Q8_0, tokenizer="smollm")

    def _random(self, folder: Path, family: str) -> Path:
        shape = {"hidden_size": HIDDEN, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
        own = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "head_dim": HIDDEN // 4}
        folder.mkdir()
        save_model(folder, family, **shape, **own | FAMILIES[family])
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo.FOLDER / name, folder)
        return folder

    def _draft(self, folder: Path) -> Path:
        folder.mkdir()
        save_draft(folder, DRAFT, random_tensors(DRAFT), num_target_layers=LAYERS, vocab_size=VOCAB)
        return folder


def told_to(row: Arrangement, models: Models) -> list[str]:
    """Return the options that change answers. Every server of the row's kind gets them, the plain one included."""
    words = [models.path(row), "--max-ctx", str(CONTEXT), "--kv-dtype", row["kv dtype"], "--dtype", row["dtype"]]
    if row["weights"] in {"int8", "int4"}:
        words += ["--quantize", row["weights"]]
    return words


def arranged(row: Arrangement, models: Models, folder: Path, daemon: str) -> list[str]:
    words = [*told_to(row, models), "--slots", row["slots"], "--chunk", row["chunk"]]
    targets = {"split": "cpu:0,cpu:0", "process": "cpu:0,ipc+cpu:0", "daemon": f"cpu:0,{daemon}"}
    if row["target"] in targets:
        words += ["--target-devices", targets[row["target"]]]
    if row["target"] == "daemon":
        (folder / "secret").write_text(WORDS)
        words += ["--shard-secret-file", str(folder / "secret")]
    if row["pool"] != "none":
        size = {"auto": 1.0, "int8": 0.3, "fp8": 0.3}[row["kv dtype"]] * (0.5 if smaller(row) else 1)
        kib = POOL_PAGES[row["pool"]] * 256 * ROW_KIB[row["family"]] * size
        words += ["--kv-memory", str(max(1, round(kib / 1024)))]
    words += ["--draft", models.draft(row), *["--ddtree"] * (row["draft"] == "trees")]
    words += ["--draft-residency", row["draft residency"]] * (row["draft"] != "none")
    words += ["--draft-device", "ipc+cpu:0"] * (row["draft placement"] == "process")
    words += ["--kv-cache-codec", row["codec"], "--kv-cache-min-tokens", "64"]
    words += ["--kv-cache-budget", row["disk budget"], "--host-cache-budget", row["host budget"]]
    if row["scope"] != "off":  # which is what `serving` says where nothing else is said
        words += ["--disk-prefix-cache", row["scope"], "--kv-cache-dir", str(folder / "kv")]
    if row["compression"] != "off":
        drafter = "demo"  # of the same tokenizer, which all of them have
        words += ["--prefill-compression", row["compression"], "--prefill-drafter", drafter]
        words += ["--prefill-threshold", "300", "--prefill-keep-ratio", "0.4"]
        words += ["--prefill-drafter-device", "ipc+cpu:0"] * (row["drafter placement"] == "process")
        words += ["--disk-prefix-cache-compress"] * (row["freezing"] == "on")
    if row["checkpoints"] == "0":
        words += ["--state-checkpoints", "0"]
    return [*words, *["--paranoid"] * (row["paranoid"] == "on")]


def smaller(row: Arrangement) -> bool:
    """Are its numbers two bytes? The demos' are where nothing else is said."""
    return row["dtype"] == "bfloat16" or (row["dtype"] == "auto" and row["family"] in demo.FOLDERS)


@contextmanager
def daemon_of(row: Arrangement, models: Models) -> Iterator[str]:
    if row["target"] != "daemon":
        yield ""
        return
    with listening(models.path(row), "--device", "cpu") as address:
        yield address


# --- what clients do ---


@define
class CoveringClient:
    """A client that makes one request after the other until it is stopped, or until the server does not answer any
    more.
    """

    url: str
    requests: Sequence[MixedRequest]
    answers: list[tuple[MixedRequest, Told]] = field(factory=list[tuple[MixedRequest, Told]])
    refused: list[str] = field(factory=list[str])
    errors: list[BaseException] = field(factory=list[BaseException])
    left: int = 0
    dead: bool = False

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=120, verify=NO_TLS) as client:
                for request in self.requests:
                    self.ask(client, request)
        except httpx.TransportError:
            self.dead = True
        except BaseException as error:  # noqa: BLE001 - kept for the thread that joins this one
            self.errors.append(error)

    def ask(self, client: httpx.Client, request: MixedRequest) -> None:
        if request.leaves is not None:
            with client.stream("POST", request.path, json=request.fields) as stream:
                for seen, _ in enumerate(stream.iter_lines()):
                    if seen >= request.leaves:
                        break
            self.left += 1
            return
        response = client.post(request.path, json=request.fields)
        if response.status_code == 200:
            self.answers.append((request, response.json()))
        else:
            self.refused.append(f"{response.status_code} {response.text[:300]}")


def live(
    server: Running, work: Sequence[Sequence[MixedRequest]], *, kills: bool, random: Random
) -> list[CoveringClient]:
    """Clients at once. kills: shards in processes of their own are killed meanwhile."""
    clients = [CoveringClient(server.url, requests) for requests in work]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.5)
        if kills and random.random() < 0.4:
            kills = False
            kill_one(server, random)
    return clients


def kill_one(server: Running, random: Random) -> None:
    """A process of the server's that computes for it."""
    try:
        memory = server.client.get("/props").json()["memory"]
    except (httpx.HTTPError, KeyError):
        return
    parts = [*memory.get("shards", []), memory.get("draft") or {}, memory.get("drafter") or {}]
    others = [one for part in parts if (one := part.get("process")) and one != server.process.pid]
    if others:
        with suppress(ProcessLookupError):  # it was killed before, and has not been asked since
            os.kill(random.choice(others), signal.SIGKILL)


# --- what is compared ---


def said(answer: Told) -> list[Any]:
    """Return what an answer says: the log-probabilities of every choice, or its text where there are none."""
    found = list[Any]()
    for choice in answer["choices"]:
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:
            found.append([one["logprob"] for one in logprobs["content"]])
        else:
            found.append(
                [choice.get("text"), choice["finish_reason"], logprobs.get("tokens"), logprobs.get("token_logprobs")]
            )
    return found


def shortened(answer: Told) -> list[Spans | None]:
    """Return the spans of the prompt that were served, for every choice; None where the whole prompt was.

    Choices of one request are jobs of their own. Where a drafter's process is killed, some of them may be shortened and
    others not.
    """
    about = answer["rekindle"]
    jobs = about.get("jobs") or [about]
    return [spans_of(job.get("compression") or {}) for job in jobs]


def spans_of(logprobs: Told) -> Spans | None:
    if (
        logprobs.get("why") is not None
        or not logprobs.get("spans")
        or logprobs["kept_tokens"] == logprobs["original_tokens"]
    ):
        return None
    return tuple((start, stop) for start, stop in logprobs["spans"])


@define
class PlainServer:
    """The plain server of a kind, and what it has said."""

    server: Running
    _known: dict[tuple[str, str, Spans | None], list[Any]] = field(factory=dict[Any, "list[Any]"])

    def right(self, request: MixedRequest, answer: Told) -> list[Any]:
        """Return what the answer should have been."""
        found = shortened(answer)
        return [self.served(request, spans)[number] for number, spans in enumerate(found)]

    def served(self, request: MixedRequest, spans: Spans | None) -> list[Any]:
        """All choices of a request of whose prompt these spans are served."""
        key = request.path, request.body, spans
        if key not in self._known:
            self._known[key] = self.fresh(request, spans)
        return self._known[key]

    def fresh(self, request: MixedRequest, spans: Spans | None) -> list[Any]:
        fields = {name: value for name, value in request.fields.items() if name not in {"compression", "prefix_cache"}}
        if spans is None:
            return said(self.asked(request.path, fields))
        sent = fields.pop("prompt", None) or self.tokens(fields)
        kept = [token for start, stop in spans for token in sent[start:stop]]
        fields.pop("messages", None)
        found = self.asked(PLAIN, {**fields, "prompt": kept, "logprobs": 1})
        if request.path == PLAIN:
            return said(found)
        return [choice["logprobs"]["token_logprobs"] for choice in found["choices"]]

    def asked(self, path: str, fields: dict[str, Any]) -> Told:
        response = self.server.client.post(path, json=fields)
        assert response.status_code == 200, (response.text[:500], fields)
        found: Told = response.json()
        return found

    def tokens(self, fields: dict[str, Any]) -> list[int]:
        """Return the tokens of a chat's prompt."""
        text = self.asked("/apply-template", {"messages": fields["messages"]})["prompt"]
        found: list[int] = self.asked("/tokenize", {"content": text, "parse_special": True})["tokens"]
        return found


@define
class RowResult:
    """The result of one arrangement."""

    row: Arrangement
    answers: int = 0
    differing: int = 0
    left: int = 0
    refused: list[str] = field(factory=list[str])
    restored: int = 0
    shortened: int = 0
    seconds: float = 0
    examples: list[Told] = field(factory=list[Told])
    trouble: str = ""

    @property
    def shown(self) -> Told:
        chosen = ",".join(self.row[name] for name in ("family", "weights", "dtype", "kv dtype", "target", "draft"))
        counts = {"answers": self.answers, "differing": self.differing, "left": self.left}
        more = {"refused": len(self.refused), "restored": self.restored, "shortened": self.shortened}
        return {"row": self.row.number, "chosen": chosen, **counts, **more, "seconds": round(self.seconds)}


def run(row: Arrangement, models: Models, folder: Path, *, requests: int, seed: int) -> RowResult:
    random, found, began = Random(f"{seed}:{row.number}"), RowResult(row), time.monotonic()
    pool = [drawn(random, compressing=row["compression"] != "off") for _ in range(max(8, requests // 2))]
    answers, lives = list[tuple[MixedRequest, Told]](), 2
    with daemon_of(row, models) as daemon:
        words = arranged(row, models, folder, daemon)
        for part in range(lives):
            share = max(1, requests // (lives * CLIENTS))
            work = [[random.choice(pool) for _ in range(share)] for _ in range(CLIENTS)]
            with serving(*words, trusting=True) as server:
                killer = threading.Timer(random.uniform(2, 6), server.process.kill) if part == 0 else None
                if killer is not None:
                    killer.start()
                clients = live(server, work, kills=part == 1 and "process" in row.values.values(), random=random)
                if killer is not None:
                    killer.cancel()
                    server.process.kill()
                elif server.stop() != 0:
                    found.trouble = f"exit status {server.process.returncode}"
            quiet("".join(line for line in server.errors if part == 1))
            for client in clients:
                if client.errors:
                    raise client.errors[0]
                if client.dead and part == 1:
                    found.trouble = "the server has gone: " + "".join(server.errors)[-2000:]
                answers += client.answers
                found.refused += client.refused
                found.left += client.left
    compare(row, models, found, answers)
    found.seconds = time.monotonic() - began
    return found


def compare(row: Arrangement, models: Models, found: RowResult, answers: Sequence[tuple[MixedRequest, Told]]) -> None:
    how = ("--slots", "1", "--draft", "none", "--host-cache-budget", "0", "--prefill-compression", "off")
    with serving(*told_to(row, models), *how) as server:
        plain = PlainServer(server)
        for request, answer in answers:
            ours, right = said(answer), plain.right(request, answer)
            found.answers += 1
            found.shortened += any(spans is not None for spans in shortened(answer))
            found.restored += answer["rekindle"]["restored_tokens"] > 0
            if ours != right:
                found.differing += 1
                found.examples.append({"asked": request.fields, "came": ours, "right": right, **answer["rekindle"]})


def covering(
    seed: int, rows: Sequence[int] | None, requests: int, limit_s: float = float("inf")
) -> Iterator[RowResult]:
    """Each row as it is done. limit_s: no other row begins after so many seconds."""
    began, chosen = time.monotonic(), arrangements(seed)
    with tempfile.TemporaryDirectory(prefix="covering-") as name, ExitStack() as stack:
        stack.callback(os.environ.pop, VARIABLE, None)
        models = Models(Path(name))
        for row in chosen if rows is None else [chosen[number] for number in rows]:
            if time.monotonic() - began > limit_s:
                return
            folder = Path(name) / f"row-{row.number}"
            folder.mkdir()
            try:
                yield run(row, models, folder, requests=requests, seed=seed)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted, and the rest goes on
                yield RowResult(row, trouble="".join(traceback.format_exception(error)))
            shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.covering", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="numbers of the array's rows, such as 0-35 or 3,7; all by default")
    parser.add_argument("--requests", type=int, default=48, help="of each row")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no row begins")
    parser.add_argument("--json", type=Path, help="write what came of it there, too")
    asked = parser.parse_args()
    done = list[RowResult]()
    for one in covering(asked.seed, numbers(asked.rows), asked.requests, asked.limit):
        done.append(one)
        print(json.dumps(one.shown), one.trouble, flush=True)  # noqa: T201
        for example in one.examples[:2]:
            print(f"  {one.row}\n  {json.dumps(example)[:3000]}", flush=True)  # noqa: T201
        for said_no in sorted(set(one.refused))[:3]:
            print(f"  {said_no}", flush=True)  # noqa: T201
    print_table(f"Covering array, seed {asked.seed}", [one.shown for one in done])
    counts = {"rows": len(done), "of": len(arrangements(asked.seed)), "answers": sum(one.answers for one in done)}
    figures = {**counts, "differing": sum(one.differing for one in done), "machine": asdict(describe_machine())}
    print(json.dumps(figures))  # noqa: T201
    if asked.json is not None:
        asked.json.write_text(json.dumps({**figures, "done": [one.shown for one in done]}))
    return 1 if any(one.differing or one.trouble for one in done) else 0


def numbers(text: str) -> list[int] | None:
    """Return the numbers of a text such as `0-3,7`; None for an empty one."""
    if not text:
        return None
    found = list[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
