"""Tests of the models that this machine has already: where they are looked for, how they are named, and what is shown
of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from adapters import demo
from engine.__main__ import main
from engine.loading.background_load import load_target
from engine.serving.announce import describe_costs
from engine.settings.model_catalog import (
    LocalModel,
    choose_served_name,
    find_hub_folder,
    find_model,
    list_local_models,
    locate_model,
)
from engine.settings.options import build_options
from engine.settings.output.formatting import format_bytes
from engine.settings.preflight import prepare_options
from engine.settings.user_error import UserError
from engine.tools.list_models import format_price, list_model
from tests.models.checkpoints import EXPERTS, save_model, save_qwen3
from tests.models.ggufs import write_gguf

COMMIT, OLDER = "c0ffee" * 6 + "c0ff", "0ld" * 13 + "0"


def touched(path: Path, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With models in it."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub = tmp_path / ".cache" / "huggingface" / "hub"
    repository = hub / "models--Qwen--Qwen3-4B"
    touched(repository / "refs" / "main", COMMIT)
    for commit in (COMMIT, OLDER):
        touched(repository / "blobs" / commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").symlink_to(f"../../blobs/{commit}")
    files = hub / "models--some--Llama-GGUF" / "snapshots" / OLDER
    for name in ("Llama-Q4_K_M.gguf", "Llama-Q8_0-00001-of-00002.gguf", "Llama-Q8_0-00002-of-00002.gguf"):
        touched(hub / "models--some--Llama-GGUF" / "blobs" / name)
        files.mkdir(parents=True, exist_ok=True)
        (files / name).symlink_to(f"../../blobs/{name}")
    touched(files / "mmproj-Llama-f16.gguf")
    touched(hub / "datasets--some--data" / "snapshots" / COMMIT / "config.json")
    touched(hub / "models--not--there" / "refs" / "main", COMMIT)
    mine = tmp_path / "models"
    touched(mine / "mine" / "config.json")
    touched(mine / "gguf" / "small.Q4_0.gguf")
    touched(mine / "deep" / "Qwen3-4B" / "config.json")
    touched(mine / ".git" / "config.json")
    touched(mine / "notes.txt")
    return tmp_path


def test_models_are_found_where_people_have_them(home: Path) -> None:
    hub = home / ".cache" / "huggingface" / "hub"
    files = hub / "models--some--Llama-GGUF" / "snapshots" / OLDER
    assert {one.name: one.path for one in list_local_models({})} == {
        "Qwen/Qwen3-4B": hub / "models--Qwen--Qwen3-4B" / "snapshots" / COMMIT,
        "some/Llama-GGUF/Llama-Q4_K_M.gguf": files / "Llama-Q4_K_M.gguf",
        "some/Llama-GGUF/Llama-Q8_0-00001-of-00002.gguf": files / "Llama-Q8_0-00001-of-00002.gguf",
        "mine": home / "models" / "mine",
        "deep/Qwen3-4B": home / "models" / "deep" / "Qwen3-4B",
        "gguf/small.Q4_0.gguf": home / "models" / "gguf" / "small.Q4_0.gguf",
    }


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_hubs_folder_is_where_its_own_library_has_it(environment: dict[str, str], folder: str) -> None:
    assert find_hub_folder(environment) == Path(folder)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Qwen/Qwen3-4B", COMMIT),
        ("qwen/qwen3-4b", COMMIT),
        ("deep/Qwen3-4B", "deep/Qwen3-4B"),
        ("Mine", "models/mine"),
        ("Llama-Q4_K_M.gguf", "Llama-Q4_K_M.gguf"),
        ("llama-q4_k_m", "Llama-Q4_K_M.gguf"),
        ("Llama-Q8_0", "Llama-Q8_0-00001-of-00002.gguf"),
        ("small.Q4_0", "small.Q4_0.gguf"),
    ],
)
def test_a_model_is_served_by_its_name(name: str, end: str, home: Path) -> None:
    assert locate_model(name, {}).endswith(end)


@pytest.mark.parametrize("name", ["/nowhere/model", "./here", "../there", "~someone/else"])
def test_a_path_stays_a_path(name: str, home: Path) -> None:
    assert locate_model(name, {}) == name
    assert locate_model("~/models/x", {}) == str(home / "models" / "x")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Qwen3-4B", ["matches Qwen/Qwen3-4B, deep/Qwen3-4B", "give the full name"]),
        ("Qwen3-8B", ["similar: ", "Qwen/Qwen3-4B", "`rekindle models`", "`hf download ORG/NAME`"]),
        ("Qwen/Qwen3-8B", ["no such folder", "`hf download Qwen/Qwen3-8B`", "similar: Qwen/Qwen3-4B"]),
        ("demos", ["similar: demo"]),
        ("xyzzy", ["no model of that name in ~/models or the Hugging Face cache;"]),
    ],
)
def test_a_model_that_is_not_here_is_told_with_what_is(name: str, parts: list[str], home: Path) -> None:
    with pytest.raises(UserError) as refused:
        prepare_options(build_options(model=name))
    assert all(part in str(refused.value) for part in parts), refused.value
    assert "\n" not in str(refused.value)


def test_what_is_served_from_the_hub_is_called_by_its_repository(home: Path) -> None:
    models = list_local_models({})
    assert {choose_served_name(one.path) for one in models} == {
        "Qwen/Qwen3-4B",
        "Llama-Q4_K_M",
        "Llama-Q8_0",
        "mine",
        "Qwen3-4B",
        "small.Q4_0",
    }
    assert find_model("nothing", models) is None


def test_a_shell_completes_the_names_of_models(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat"):
        assert main(["__complete", command, ""]) == 0
        shown = capsys.readouterr().out.split()
        assert {"demo", "demo-hybrid", "mine", "Qwen/Qwen3-4B", "gguf/small.Q4_0.gguf"} <= set(shown)
        assert main(["__complete", command, "~/models/g"]) == 0
        shown = capsys.readouterr().out.split()
        assert "~/models/gguf/" in shown
        assert "~/models/notes.txt" in shown


def test_a_home_without_any_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list_local_models({}) == []


@pytest.fixture
def run_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """Return a function that runs `rekindle models` in a home with one model that can be served and one that cannot,
    and returns what it prints.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("engine.loading.memory_estimate.measure_available", lambda _: 18 << 30)
    save_qwen3(tmp_path / "models" / "mine", max_position_embeddings=16384)
    touched(tmp_path / "models" / "other" / "config.json", '{"model_type": "gpt2"}')

    def run(*words: str) -> Any:
        assert main(["models", "--device", "cpu", *words]) == 0
        out = capsys.readouterr().out
        return {one["name"]: one for one in json.loads(out)} if "--json" in words else out

    return run


def test_models_are_listed_with_what_they_would_be_served_with(run_models: Callable[..., Any]) -> None:
    found = run_models("--json")
    assert list(found) == ["demo", "demo-hybrid", "mine", "other"]
    mine, other, demo = found["mine"], found["other"], found["demo"]
    assert (mine["family"], mine["stored"], mine["dtype"], mine["limit"]) == ("qwen3", "float32", "float32", 16384)
    assert (mine["slots"], mine["context"], mine["fits"], mine["advice"]) == (16, 16384, True, [])
    assert mine["bytes"] > 4 * mine["parameters"]
    assert mine["devices"]["cpu"][0] < mine["devices"]["cpu"][1]
    assert "model_type 'gpt2' is not supported" in other["why"]
    assert (demo["slots"], demo["context"], demo["stored"]) == (16, 32768, "bfloat16")
    coded = run_models("--json", "--kv-dtype", "int8")["mine"]
    assert (mine["kv_dtype"], coded["kv_dtype"]) == ("float32", "int8")
    assert coded["devices"]["cpu"][0] < mine["devices"]["cpu"][0], "rows take less"
    text = run_models()
    assert "16 x 16,384 tokens" in text
    assert "other: not served: config.json: model_type 'gpt2'" in text
    assert "Searched ~/models and ~/hub." in text


async def test_a_start_says_the_same_of_a_token_as_the_list() -> None:
    options = build_options(model="demo", device="cpu", slots=1, max_ctx=256, disk_prefix_cache="off")
    listed = list_model(LocalModel("demo", demo.FOLDER), options)
    assert listed.draft_token > 0
    target = await load_target(options)
    try:
        costs = f"context={format_bytes(listed.token)} a token, draft {format_bytes(listed.draft_token)}"
        assert describe_costs(target).endswith(costs)
        assert format_price(listed).replace("\n", " ") == costs.removeprefix("context=")
    finally:
        await target.close()


def test_bits_and_what_a_context_costs_are_told_of_folders_files_and_experts(
    run_models: Callable[..., Any], tmp_path: Path
) -> None:
    models = tmp_path / "models"
    save_model(models / "sparse", "qwen3_moe", **EXPERTS)
    wide = {"hidden_size": 256, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 64}
    save_qwen3(tmp_path / "wide", **wide)
    write_gguf(models / "wide.gguf", tmp_path / "wide", Kind.Q8_0, tokenizer=None)
    found = run_models("--json", "--experts", "host")
    assert run_models("--json", "--cpu-experts", "1")["sparse"]["cpu_experts"] == 1
    rows = 2 * 3 * 2 * 16 * 4  # keys and values, layers, heads, their size, float32
    assert (found["mine"]["bits"], found["mine"]["token"], found["mine"]["state"]) == (32, rows, 0)
    assert (found["sparse"]["bits"], found["sparse"]["token"]) == (32, rows)
    assert found["sparse"]["experts"] == 0, "on a CPU they are in host memory as it is"
    file = found["wide.gguf"]
    assert (file["stored"], file["token"]) == ("Q8_0", 2 * 3 * 2 * 64 * 2)
    assert 8.5 < file["bits"] < 8.6, "and norms"
    assert found["demo-hybrid"]["state"] > 1 << 20
    text = run_models()
    assert "1.5 KiB a token" in text
    assert "32.0 bits" in text


def test_what_does_not_fit_is_told_with_what_would_help(
    run_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (taken, _) = run_models("--json", "--max-ctx", "8192", "--slots", "2")["mine"]["devices"]["cpu"]
    monkeypatch.setattr("engine.loading.memory_estimate.measure_available", lambda _: taken * 5 // 4)
    mine = run_models("--json", "--slots", "4")["mine"]
    assert (mine["fits"], mine["context"]) == (True, 4096)
    mine = run_models("--json", "--max-ctx", "16384", "--slots", "4")["mine"]
    assert (mine["fits"], mine["advice"]) == (False, [])
    mine = run_models("--json", "--max-ctx", "16384")["mine"]
    assert mine["fits"], "in one slot"
    monkeypatch.setattr("engine.loading.memory_estimate.measure_available", lambda _: 1)
    text = run_models()
    assert "mine: does not fit; this would help: a smaller model" in text
