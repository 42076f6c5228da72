"""Whole models with the kernels of GPUs in Triton's interpreter, beside plain torch. `TRITON_INTERPRET=1` is set."""

from __future__ import annotations

import sys

import torch

from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.windowed import read_config

ROWS = (3, 1)  # of two steps


def run_model(name: str, kernels: Kernels) -> torch.Tensor:
    config = read_config(name)
    weights = RandomWeights(config, scale=config.hidden_size**-0.5)
    shard = DenseShard(config, weights, kernels, ShardPlacement(dtype=torch.float32, slots=1, capacity=256))
    tokens = torch.arange(sum(ROWS)) * 7 % config.vocab_size
    found, at = [], 0
    for count in ROWS:
        step = Step((Segment(0, at, count),), 4)
        found.append(shard.forward(step, tokens[at : at + count]).hidden[:count].clone())
        shard.commit(step, [count])
        at += count
    return torch.cat(found)


def check_model(name: str) -> None:
    """Gates, biases, norms around layers and experts in the places that a family gives them."""
    kernels = TritonKernels(torch.device("cpu"), pdl=False)
    kernels.graphs.enabled = False
    torch.testing.assert_close(run_model(name, kernels), run_model(name, ReferenceKernels()), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    check_model(sys.argv[1])
