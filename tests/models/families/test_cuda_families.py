"""On a CUDA device every new family gives the logits of the reference, and a row the same bits in any bucket."""

from __future__ import annotations

import pytest
import torch

from adapters.models.decoder.config.latent_config import LatentConfig
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.layers.latent_layer import LatentShape
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.glm4_moe import NormedGlm4MoeConfig
from adapters.models.families.minimax_m2 import MiniMaxM2Config
from adapters.models.families.mistral import Ministral3Config
from adapters.models.families.seed_oss import SeedOssConfig
from adapters.models.kernels.interfaces.experts_interface import GroupedExpertsShape, SigmoidExpertsShape
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import same_bits, tokens_of
from tests.models.hybrids import advance
from tests.models.windowed import read_config

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
SIGMOID = SigmoidExpertsShape(12, 3, 64, is_normalized=True, shared=64, groups=3, chosen_groups=2, factor=1.5)
PLAIN = SigmoidExpertsShape(12, 3, 64, is_normalized=True)
SOFTMAX = GroupedExpertsShape(12, 3, 64, is_normalized=False, shared=64, groups=3, chosen_groups=2, factor=1.5)
LATENT = LatentShape(queries=48, latent=64, rotated=16, plain=32, values=48, scale=0.2, interleaved=True)
CONFIGS = {
    "ministral3": Ministral3Config(256, 128, 256, 3, 4, 2, 32, 2048, 1e6, beta=0.2, original=100),
    "seed_oss": SeedOssConfig(256, 128, 256, 3, 4, 2, 32, 2048, 1e6, out_bias=True),
    "glm4_moe": NormedGlm4MoeConfig(256, 128, 256, 3, 4, 2, 32, 2048, 1e6, experts=SIGMOID, dense=1, rotated=16),
    "minimax_m2": MiniMaxM2Config(256, 128, 64, 3, 4, 2, 32, 2048, 1e6, experts=PLAIN, rotated=16),
    "gpt_oss": read_config("gpt_oss"),
    "laguna": read_config("laguna"),
    "deepseek_v3": LatentConfig(256, 128, 256, 3, 4, 1, 80, 2048, 1e6, latent=LATENT, experts=SIGMOID, dense=(0,)),
    "deepseek_v2, many heads": LatentConfig(256, 128, 256, 3, 48, 1, 80, 2048, 1e6, latent=LATENT, experts=SOFTMAX),
}


def build(name: str, kernels: object, device: torch.device, dtype: torch.dtype) -> DenseShard:
    config = CONFIGS[name]
    weights = RandomWeights(config, scale=0.1)
    placement = ShardPlacement(device=device, dtype=dtype, slots=2, capacity=512)
    return DenseShard(config, weights, kernels, placement)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_reference(name: str) -> None:
    tokens = tokens_of(200, CONFIGS[name].vocab_size)
    found = advance(build(name, triton_cuda.TritonKernels(DEVICE), DEVICE, torch.float32), tokens.to(DEVICE), [64])
    expected = advance(build(name, ReferenceKernels(), torch.device("cpu"), torch.float32), tokens, [64])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_any_bucket(name: str) -> None:
    tokens = tokens_of(200, CONFIGS[name].vocab_size).to(DEVICE)
    shard = build(name, triton_cuda.TritonKernels(DEVICE), DEVICE, torch.bfloat16)
    expected = advance(shard, tokens, [64])
    for counts in ([1], [5, 3, 17], [33]):
        assert same_bits(advance(shard, tokens, counts, slot=1), expected), counts
