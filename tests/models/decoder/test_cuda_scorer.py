"""A drafter's scores on CUDA: those of a CPU, and the same bits in whatever portions they were made."""

from __future__ import annotations

import pytest
import torch

import adapters.models.decoder.scorer as scorer_module
from adapters.models.decoder.scorer import Scorer
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.numerics.synthetic import RandomWeights

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

CONFIG = Qwen3Config(4096, 256, 512, 3, 8, 2, 64, 4096, 1e6)


def scored(kernels: Kernels, device: str, dtype: torch.dtype, buckets: tuple[int, ...], count: int) -> list[float]:
    """Weights and tokens are the same on every device."""
    scorer = Scorer(CONFIG, RandomWeights(CONFIG, 1), kernels, torch.device(device), dtype, buckets, 4096)
    scorer.weights.load_back()
    tokens = torch.randint(0, CONFIG.vocab_size, (count,), generator=make_generator(count))
    work = scorer.begin(tuple(tokens.tolist()))
    while not work.complete:
        work.advance()
    return work.scores()


@pytest.fixture(params=["all", "bands"])
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set which rows are attended to: all before a row, or, in bands of 512, the first and the latest."""
    for name, value in (("SINK", 128), ("WINDOW", 512), ("BAND", 512), ("ASKING", 200)):
        if request.param == "bands":
            monkeypatch.setattr(scorer_module, name, value)


@pytest.mark.usefixtures("seen")
def test_scores_are_those_of_a_cpu() -> None:
    wanted = scored(CpuKernels(torch.float32), "cpu", torch.float32, (256,), 2300)
    found = scored(triton_cuda.TritonKernels(torch.device("cuda")), "cuda", torch.float32, (128, 512), 2300)
    assert found == pytest.approx(wanted, rel=5e-3, abs=1e-7)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_the_same_bits_in_any_portions(dtype: torch.dtype) -> None:
    whole, *others = (
        scored(triton_cuda.TritonKernels(torch.device("cuda")), "cuda", dtype, buckets, 2300)
        for buckets in ((128, 2048), (128, 512), (64, 128))
    )
    assert others == [whole, whole]
