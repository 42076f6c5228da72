"""An 8B-shaped Qwen3 with random weights on one CUDA device: what an EAGLE-3 draft and copies of earlier text gain.

`python -m benchmarks.drafts_8b [--parts eagle3,copies] [--answer 160] [--record]`

With random weights no proposal is ever right, so acceptance is forced as in `benchmarks.speculation_8b`: the proposer
does all its work, and its proposals are replaced by what the target is known to pick. `forced` is the number of tokens
that a step with proposals gives. `tokens a decode step` counts all steps, also those before the text is searched for
the first time. `x plain` compares with plain decoding without proposals, each step of which begins before the one
before it has been read.

eagle3: a draft of the published shape. `ms proposing` is what the host takes to launch a chain, while the device is at
work. copies: a launch that copies by a rule, as `--draft suffix` does; the text is searched in every step. Times are
those of whole launches by the wall clock. Figures are those of the width that gains most, which is the one that the
engine would take.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.device.executor import DeviceExecutor
from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.proposer import Proposer, TextProposer
from adapters.device.speculation.suffix_proposer import SuffixProposer
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.eagle3.checkpoint import TOKEN_MAP, list_eagle3_tensors
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.drafts.eagle3.draft import Eagle3Draft
from adapters.models.kernels.factory import build_text_matcher
from adapters.models.kernels.interfaces.text_matching import NO_BRANCH, Branch
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE
from benchmarks.results import Figure, Goal, publish
from benchmarks.speculation_8b import BUCKETS, CONTEXT, LAYERS, Forced, Pair, build_pair, prompt
from benchmarks.tables import median, print_table
from effects.all import EffectRequest, Outcome
from effects.decode import MATCH_CLASSES, Copying, Decoded, RunDecode
from effects.ids import RequestId, SlotId, Tokens
from effects.job import Sampling
from effects.prefill import OpenSlot, RunPrefill

CONFIG = Eagle3Config(
    4096, 12288, 32, 8, 128, Rotary(128, 1e6), (1, LAYERS // 2 - 1, LAYERS - 4), 4096, vocab=32_000, has_map=True
)
# Proposals, and the tokens that a decode step gives.
DRAFTED = {3: (1, 2, 3, 4), 7: (1, 3, 5, 8)}
COPIED = {3: (1, 4), 7: (1, 4, 8), 15: (1, 4, 8, 16)}
GOALS = {("EAGLE-3", 3): 2.0, ("copies", 4): 2.5, ("copies", 8): 4.0}


@define
class DeviceEagle3:
    """Weights of an EAGLE-3 draft, made on the device. Its head predicts every fourth token."""

    def read(self, name: str) -> Tensor:
        shape = list_eagle3_tensors(CONFIG)[name]
        if name == TOKEN_MAP:
            return torch.arange(CONFIG.vocab) * 4
        key = hashlib.blake2b(name.encode(), digest_size=7).digest()
        generator = torch.Generator(DEVICE).manual_seed(int.from_bytes(key, "little"))
        tensor = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(0.0, 0.02, generator=generator)
        return tensor.add_(1.0) if tensor.dim() == 1 else tensor

    def has_tensor(self, name: str) -> bool:
        return name in list_eagle3_tensors(CONFIG)

    def digest(self) -> str:
        return "random"


@define(eq=False)
class ForcedCopies(TextProposer):
    """Searches the text as usual, and copies `right` of the tokens that will come with wrong ones behind them."""

    searched: SuffixProposer
    known: Tokens
    right: int
    _lengths: dict[int, int] = field(init=False, factory=dict[int, int])  # tokens of each slot

    def find_matches(self, slots: Sequence[tuple[int, SlotState]]) -> Sequence[int]:
        self.searched.find_matches(slots)
        return [MATCH_CLASSES[-1]] * len(slots)

    def index_texts(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        self.searched.index_texts(slots)

    def note_tokens(self, slots: Sequence[tuple[int, SlotState]]) -> None:
        self.searched.note_tokens(slots)

    def read_match(self, slot: int, state: SlotState) -> int:
        self.searched.read_match(slot, state)
        self._lengths[slot] = len(state.tokens)
        return MATCH_CLASSES[-1]

    def copy(self, slot: int, count: int) -> Tokens:
        coming = self.known[self._lengths[slot] :][:count]
        return tuple(token if at < self.right else (token + 1) % 100 for at, token in enumerate(coming))

    def find_branch(self, slot: int, chain: int, count: int) -> Branch:
        return NO_BRANCH

    def count_on_branch(self, slot: int) -> int:
        return 0


@frozen(eq=False)
class Proposing:
    """The proposals of a launch: `width` tokens in each step, from a draft or copied from text; by default none."""

    width: int = 0
    draft: Proposer | None = None
    text: TextProposer | None = None

    def make_step(self, most: int) -> RunDecode:
        """Return the first decode step behind the prompt. most: tokens of the launch; of a draft, its steps."""
        step = RunDecode(SlotId(0), CONTEXT - 1, prompt()[-1], steps=most)
        if self.text is not None:
            return evolve(step, copying=Copying((self.width,) * len(MATCH_CLASSES), 1 + self.width, most))
        return evolve(step, propose=self.width)


def run_launch(pair: Pair, proposing: Proposing, most: int) -> tuple[Tokens, int, float]:
    """Decode in one launch on the lane. most: as in `Proposing.make_step`.

    Return all tokens, the decode steps, and the milliseconds of a step by the wall clock.
    """
    own = {"proposer": proposing.draft, "text_proposer": proposing.text}
    executor = DeviceExecutor(evolve(pair.executor.parts, **own))
    asked, request, slot = prompt(), RequestId(0), SlotId(0)
    found, steps, started, spent = list(asked), 0, 0, 0

    def choose_next(outcomes: Sequence[Outcome]) -> EffectRequest | None:
        nonlocal steps, started, spent
        filled = max((getattr(outcome, "stop", 0) for outcome in outcomes), default=0)
        if filled < CONTEXT - 1:
            return EffectRequest(request, RunPrefill(slot, filled, min(filled + BUCKETS[-1], CONTEXT - 1)))
        done = [outcome for outcome in outcomes if isinstance(outcome, Decoded)]
        if done:
            spent = time.perf_counter_ns() - started
            steps = sum(one.steps for one in done)
            found.extend(token for one in done for token in one.tokens)
            return None
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        return EffectRequest(request, proposing.make_step(most))

    executor.rehearse(OpenSlot(slot, slot, 0, asked, Sampling()), choose_next)
    return tuple(found), steps, spent / 1e6 / steps


def describe(
    name: tuple[str, int, int], plain: tuple[Tokens, float], found: Tokens, tokens: float, spent: float
) -> dict[str, Any]:
    """Return a row. name: the kind, the number of proposals, and the tokens that a step with proposals is forced to
    give. plain: the tokens without proposals, and the milliseconds of a step. tokens, spent: those of a decode step.
    """
    known, base = plain
    kind, width, forced = name
    return {
        "kind": kind,
        "proposals": width,
        "forced": forced,
        "tokens a decode step": round(tokens, 2),
        "ms a decode step": spent,
        "x plain": tokens * base / spent,
        "differing": sum(one != other for one, other in zip(known, found, strict=False)),
        "ms proposing": 0.0,
    }


def measure_drafted(pair: Pair, plain: tuple[Tokens, float], answer: int) -> list[dict[str, Any]]:
    """The first steps of a launch let the draft follow the prompt, and are in the time of all."""
    pair.draft.load_back()
    rows = list[dict[str, Any]]()
    for width, accepted in DRAFTED.items():
        for tokens in accepted:
            for most in (4, 4, answer // tokens):  # the first runs record graphs
                forced = Forced(pair.drafting, plain[0], tokens - 1)
                found, steps, spent = run_launch(pair, Proposing(width, draft=forced), most)
            rows.append(describe(("EAGLE-3", width, tokens), plain, found, (len(found) - CONTEXT) / steps, spent))
            rows[-1]["ms proposing"] = median(forced.took_ns[1:]) / 1e6
            print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_copied(pair: Pair, plain: tuple[Tokens, float], answer: int) -> list[dict[str, Any]]:
    matcher = build_text_matcher()
    assert matcher is not None, "there is no compiled library"
    rows = list[dict[str, Any]]()
    for width, accepted in COPIED.items():
        for tokens in accepted:
            for most in (4 * (width + tokens), answer):  # the first run records graphs
                forced = ForcedCopies(SuffixProposer(matcher), plain[0], tokens - 1)
                found, steps, spent = run_launch(pair, Proposing(width, text=forced), most)
            rows.append(describe(("copies", width, tokens), plain, found, (len(found) - CONTEXT) / steps, spent))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_on_lane(pair: Pair, parts: Sequence[str], answer: int) -> list[dict[str, Any]]:
    """The plain run is timed with the draft offloaded. It is longer, so that all forced tokens are known."""
    pair.draft.offload()
    longest = answer + max(COPIED) + 1
    run_launch(pair, Proposing(), longest)  # records graphs
    found, _, base = run_launch(pair, Proposing(), longest)
    plain = found, base
    rows = [describe(("plain", 0, 1), plain, found, 1.0, base)]
    if "eagle3" in parts:
        rows += measure_drafted(pair, plain, answer)
    if "copies" in parts:
        rows += measure_copied(pair, plain, answer)
    return rows


def make_figures(rows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Make figures of the forced acceptances that have goals."""
    made = list[Figure]()
    for (kind, tokens), bound in GOALS.items():
        found = [one["x plain"] for one in rows if (one["kind"], one["forced"]) == (kind, tokens)]
        if found:
            subject = f"8B shape, {kind}, forced acceptance"
            made.append(Figure("speculation", subject, str(tokens), "x", max(found), goal=Goal(at_least=bound)))
    return made


async def measure(parts: Sequence[str], answer: int) -> list[dict[str, Any]]:
    lane = DeviceLane(DEVICE)
    build = partial(Eagle3Draft, CONFIG, DeviceEagle3())
    pair = await lane.run(partial(build_pair, lane, CONFIG.aux_layers, build))
    rows = await lane.run(partial(measure_on_lane, pair, parts, answer))
    pair.executor.close()
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", default="eagle3,copies")
    parser.add_argument("--answer", type=int, default=160, help="tokens of each run")
    given = parser.parse_args()
    rows = anyio.run(measure, given.parts.split(","), given.answer)
    print_table("Proposals with an 8B-shaped target", rows)
    publish(given, "drafts_8b", {"rows": rows}, make_figures(rows), "cuda")


if __name__ == "__main__":
    main()
