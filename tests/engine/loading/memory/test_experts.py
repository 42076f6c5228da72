"""`--experts host`: what it takes of each memory, what is refused, and on a GPU the same answers as without."""

from __future__ import annotations

import json
from pathlib import Path

import cyclopts
import pytest
import torch
from safetensors.torch import save_file

from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.families.qwen3_moe import Qwen3MoeConfig, parse
from adapters.models.numerics.synthetic import RandomWeights
from effects.ids import Tokens
from effects.job import Job
from effects.stream import EmitTokens
from engine.loading import memory_estimate as module
from engine.loading.background_load import load_target
from engine.loading.memory.device_survey import Placement
from engine.loading.memory.expert_placement import choose_expert_bytes, count_expert_weights
from engine.loading.memory.memory_fit import PAGE, fit_page_pool
from engine.loading.memory_estimate import estimate_needs
from engine.serving.announce import describe_costs
from engine.serving.wiring import run_engine
from engine.settings.config_file import parse_values
from engine.settings.options import build_options
from engine.settings.user_error import UserError
from engine.tools.list_models import can_host_experts
from tests.models.decoder.layers.test_host_experts import CONFIG

pytestmark = pytest.mark.usefixtures("rates_are_given")

DTYPE, GIB = torch.bfloat16, 1 << 30
ONE = 3 * 24 * 64 * 2
CUDA = [Placement(range(CONFIG.num_layers), torch.device("cuda"))]


@pytest.mark.parametrize("text", ["gpu", "host:", "host:0", "host:-1", "host:1e3", "host:12345", "Host", ""])
def test_what_is_no_place_for_experts_is_told(text: str) -> None:
    with pytest.raises(cyclopts.CycloptsError, match="Must be device, host, or host:N with N GiB on the device"):
        parse_values({"experts": text})


def test_places_are_read_in_gib() -> None:
    rooms = [
        build_options(experts=text).weights.device_expert_bytes for text in ("device", "host", "host:8", "host:0.5")
    ]
    assert rooms == [None, 0, 8 * GIB, GIB // 2]


@pytest.mark.parametrize(
    ("config", "plan", "said"),
    [
        (Qwen3Config(160, 64, 96, 3, 4, 2, 16, 512, 1e6), CUDA, "the model has no experts; accepted: device"),
        (CONFIG, [Placement(range(3), torch.device("cpu"))], "on a CPU, experts are in host memory anyway"),
        (CONFIG, [*CUDA, *CUDA], "needs one CUDA device of this process"),
    ],
)
def test_where_they_cannot_be_is_refused(config: Qwen3Config, plan: list[Placement], said: str) -> None:
    with pytest.raises(UserError, match=f"--experts host: {said}"):
        choose_expert_bytes(build_options(experts="host").weights, config, DTYPE, plan, GIB)


def test_too_little_room_for_one_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"--experts host: one expert takes 9\.0 KiB, but 8\.8 KiB would be free for them"
    ):
        choose_expert_bytes(build_options(experts="host").weights, CONFIG, DTYPE, CUDA, 2 * ONE - 500)


def test_the_room_is_what_was_asked_for_or_half_of_what_is_left_and_no_more_than_all_take() -> None:
    whole = count_expert_weights(CONFIG) * DTYPE.itemsize
    assert whole == 22 * ONE
    assert choose_expert_bytes(build_options(experts="host").weights, CONFIG, DTYPE, CUDA, 20 * ONE) == 10 * ONE
    assert choose_expert_bytes(build_options(experts="host:0.001").weights, CONFIG, DTYPE, CUDA, 0) == min(
        GIB // 1000, whole + 8 * ONE
    )
    assert choose_expert_bytes(build_options(experts="host:4").weights, CONFIG, DTYPE, CUDA, 0) == whole + 8 * ONE


def test_both_memories_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Qwen3MoeConfig(160, 64, 96, 3, 4, 2, 16, 512, 1e6, experts=CONFIG.experts, dense_layers=(0,))
    monkeypatch.setattr(module, "measure_available", lambda device: 10_000_000 if device.type == "cuda" else 1_000_000)
    monkeypatch.setattr(module, "measure_allowed", lambda _: 1 << 40)
    [whole] = estimate_needs(build_options(chunk=64), shape, DTYPE, CUDA, None)
    device, host = estimate_needs(build_options(chunk=64, experts="host:0.001"), shape, DTYPE, CUDA, None)
    assert (host.name, host.fixed, host.row) == ("cpu", 22 * ONE, 0)
    assert device.fixed == whole.fixed - 22 * ONE + 30 * ONE, "all of them, and as many again as are on their way"
    assert device.row == whole.row
    fit = fit_page_pool([device, host], 512, context=512, memory=PAGE * 4 * device.row)
    assert (fit.pages, fit.fits) == (4, True), "host memory with experts alone bounds no pages"


def test_models_without_experts_and_on_a_cpu_are_listed_as_they_are() -> None:
    assert not can_host_experts(build_options(device="cpu", experts="host"), CONFIG)


async def answers(target) -> list[Tokens]:
    answers = list[Tokens]()
    async with run_engine(target.settings, target.executor, paranoid=True) as running:
        for seed in range(3):
            tokens: Tokens = ()
            async for message in running.submissions.submit(Job(tuple(range(7 + seed, 60 + seed)), 60)):
                tokens += message.tokens if isinstance(message, EmitTokens) else ()
            answers.append(tokens)
    return answers


def saved(folder: Path) -> Path:
    raw = {
        "model_type": "qwen3_moe",
        "vocab_size": 160,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    config = parse(raw)
    weights = RandomWeights(config, dtype=torch.bfloat16, scale=0.2)
    save_file({name: weights.read(name) for name in config.tensors()}, folder / "model.safetensors")
    return folder


@pytest.mark.cuda
@pytest.mark.timeout(300)
async def test_on_a_gpu_answers_are_those_of_experts_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = saved(tmp_path / "m")
    how = {"disk_prefix_cache": "off", "host_cache_budget": 0, "chunk": 64, "device": "cuda", "slots": 2}
    found = dict[str, list[Tokens]]()
    for place in ("device", "host:0.001"):
        target = await load_target(build_options(model=str(folder), experts=place, **how))
        try:
            found[place] = await answers(target)
            if target.host_experts is not None:
                shown = target.build_ledger(0).experts
                assert 0 < shown["on_device"] < shown["count"] == 48
                assert 0 < shown["brought"] < shown["needed"]
                assert shown["moved"] > shown["on_device"], "some have moved since the first"
                assert target.build_ledger(0).models["target"].host == shown["host_bytes"] == 48 * 3 * 64 * 128 * 2
                assert "experts=host (" in describe_costs(target)
        finally:
            await target.close()
    assert found["host:0.001"] == found["device"]
