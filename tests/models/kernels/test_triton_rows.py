"""Norms, biases, gates and unpacked codes of the GPU's kernels, in Triton's interpreter, alone and in whole models."""

from __future__ import annotations

import pytest

from tests.child_code import check_interpreted


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["check_norms", "check_biases", "check_gates", "check_unpacked_codes"])
def test_rows_are_those_of_operations_one_by_one(check):
    check_interpreted(f"from tests.models.kernels.interpreted_rows import {check}; {check}()", 100)


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma4, experts", "gemma4, inputs of layers, rows shared"])
def test_whole_models_are_those_of_plain_torch(name):
    check_interpreted(f"from tests.models.kernels.interpreted_layers import check_model; check_model({name!r})", 400)
