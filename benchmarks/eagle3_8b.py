"""An 8B-shaped Qwen3 with an EAGLE-3 draft of the published shape, random weights, on one CUDA device.

`python -m benchmarks.eagle3_8b [--answer 160]`

With random weights a draft is never right, so acceptance is forced as in `benchmarks.speculation_8b`: the draft does
all its work, and its proposals are replaced by what the target is known to pick. `tokens a decode step` is the forced
acceptance. `x plain` compares with a plain decode step without a draft.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import anyio
import torch
from attrs import define
from torch import Tensor

from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.config.rope import Rotary
from adapters.models.drafts.eagle3.checkpoint import TOKEN_MAP, list_eagle3_tensors
from adapters.models.drafts.eagle3.config import Eagle3Config
from adapters.models.drafts.eagle3.draft import Eagle3Draft
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE
from benchmarks.results import publish
from benchmarks.speculation_8b import LAYERS, Forced, Pair, build_pair, decoded, row
from benchmarks.tables import median, print_table

CONFIG = Eagle3Config(
    4096, 12288, 32, 8, 128, Rotary(128, 1e6), (1, LAYERS // 2 - 1, LAYERS - 4), 4096, vocab=32_000, has_map=True
)
WIDTHS = {3: (1, 2, 3, 4), 7: (1, 3, 5, 8)}  # proposals, and the tokens that a decode step gives


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


def measure_steps(pair: Pair, answer: int) -> list[dict[str, Any]]:
    """Run on the lane. The plain step is timed with the draft offloaded."""
    pair.draft.offload()
    plain, done = decoded(pair, pair.drafting, 0, answer + CONFIG.block)
    base = median(one.ns for one in done[8:]) / 1e6
    rows = [row("plain, no draft", base, plain, plain, done)]
    pair.draft.load_back()
    found, done = decoded(pair, pair.drafting, 0, answer)
    rows.append(row("plain, a draft that follows", base, plain, found, done))
    for width, accepted in WIDTHS.items():
        for tokens in accepted:
            decoded(pair, Forced(pair.drafting, plain, tokens - 1), width, 4 * tokens)  # records graphs
            forced = Forced(pair.drafting, plain, tokens - 1)
            found, done = decoded(pair, forced, width, answer)
            rows.append(row(f"{width} proposals, forced acceptance {tokens}", base, plain, found, done))
            rows[-1]["ms proposing"] = median(forced.took_ns[2:-1]) / 1e6
    return rows


async def measure(answer: int) -> list[dict[str, Any]]:
    lane = DeviceLane(DEVICE)
    build = partial(Eagle3Draft, CONFIG, DeviceEagle3())
    pair = await lane.run(partial(build_pair, lane, CONFIG.aux_layers, build))
    rows = await lane.run(partial(measure_steps, pair, answer))
    pair.executor.close()
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--answer", type=int, default=160, help="tokens of each run")
    given = parser.parse_args()
    rows = anyio.run(measure, given.answer)
    print_table("EAGLE-3 with an 8B-shaped target", rows)
    publish(given, "eagle3_8b", {"rows": rows}, [], "cuda")


if __name__ == "__main__":
    main()
