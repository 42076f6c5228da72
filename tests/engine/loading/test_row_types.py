"""Types of rows that a model or a device does not have are refused by name."""

from __future__ import annotations

import pytest
import torch

from adapters.models.kernels.formats.row_format import read_row_types
from engine.loading.prove_numerics import check_row_types
from engine.settings.user_error import UserError
from tests.models.families.test_latent import CONFIG as LATENT
from tests.models.kernels.test_row_form import FAMILIES

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("config", "named", "device", "why"),
    [
        (FAMILIES["qwen3"], "int4", CPU, "int4: heads have 24 numbers; accepted: multiples of 16"),
        (FAMILIES["qwen3"], "k=int8,v=int3.5", CPU, "k=int8,v=int3.5: heads have 24 numbers"),
        (LATENT, "k=int8,v=fp8", CPU, "keys and values at once; accepted: one type for both"),
        (LATENT, "int4", CUDA, "accepted: auto, bf16, fp8, int8"),
    ],
)
def test_a_type_that_does_not_fit_is_refused_by_name(config, named, device, why):
    with pytest.raises(UserError, match="--kv-dtype ") as error:
        check_row_types(config, read_row_types(named, torch.bfloat16), device)
    assert why in str(error.value)


@pytest.mark.parametrize("named", ["auto", "int8", "k=int8,v=bf16"])
def test_a_type_that_fits_is_taken(named):
    check_row_types(FAMILIES["qwen3"], read_row_types(named, torch.bfloat16), CPU)
    check_row_types(FAMILIES["llama"], read_row_types("k=int8,v=int4", torch.bfloat16), CUDA)
