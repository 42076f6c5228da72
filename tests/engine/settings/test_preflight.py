"""Tests of wrong options: each is refused before anything is imported or created, in one line that says what is
accepted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import engine.__main__ as command
from engine.settings.options import build_options
from engine.settings.preflight import prepare_options
from engine.settings.user_error import UserError

CHECKPOINT = "accepted: a folder with a Hugging Face checkpoint"


@pytest.fixture(autouse=True)
def a_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a home folder that has no model."""
    home = str(tmp_path_factory.mktemp("home"))
    for name in ("HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, home)


def said(**options: object) -> str:
    with pytest.raises(UserError) as refused:
        prepare_options(build_options(**options))
    return str(refused.value)


def folder(path: Path, config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def gguf(path: Path, more: bytes = b"") -> Path:
    path.write_bytes(b"GGUF\x03\0\0\0" + more)
    return path


MODELS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "nowhere": (lambda path: path / "nowhere", ["no such folder", CHECKPOINT]),
    "a GGUF file that ends": (lambda path: gguf(path / "model.gguf"), ["truncated or not a GGUF file"]),
    "a GGUF file by content": (lambda path: gguf(path / "blob"), ["truncated or not a GGUF file"]),
    "a GGUF file of nothing": (lambda path: gguf(path / "m.gguf", bytes(16)), ["general.architecture is missing"]),
    "a missing GGUF file": (lambda path: path / "x.gguf", ["no such file"]),
    "another file": (lambda path: (path / "x").write_text("x") and path / "x", ["is a file", CHECKPOINT]),
    "an empty folder": (lambda path: path, ["config.json is missing", CHECKPOINT]),
    "no JSON": (lambda path: folder(path / "m", "{"), ["config.json: not valid JSON"]),
    "deep JSON": (lambda path: folder(path / "m", "[" * 200_000), ["config.json: not valid JSON"]),
    "no object": (lambda path: folder(path / "m", [1]), ["not a JSON object"]),
    "no type": (lambda path: folder(path / "m", {}), ["model_type None", "'qwen3'"]),
    "another type": (
        lambda path: folder(path / "m", {"model_type": "gpt2"}),
        ["'gpt2'", "'llama', 'qwen2', 'mimo', 'qwen3'"],
    ),
    "a type that needs more": (
        lambda path: folder(path / "m", {"model_type": "mimo_v2_flash"}),
        ["'mimo_v2_flash' needs values of another size than keys, which is not supported"],
    ),
    "another quantisation": (
        lambda path: folder(
            path / "m", {"model_type": "qwen3", "quantization_config": {"quant_method": "bitsandbytes"}}
        ),
        ["quant_method 'bitsandbytes' is not supported; accepted: 'fp8', 'awq', 'gptq', 'compressed-tensors'"],
    ),
    "an odd type": (lambda path: folder(path / "m", {"model_type": ["x"] * 999}), ["model_type", "'qwen3'"]),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_wrong_model_is_told_with_what_is_accepted(case: str, tmp_path: Path) -> None:
    make, parts = MODELS[case]
    path = make(tmp_path)
    line = said(model=str(path))
    assert str(path) in line
    assert all(part in line for part in parts), line


def test_a_folder_of_gguf_files_is_told_apart(tmp_path: Path) -> None:
    gguf(tmp_path / "q4.gguf")
    assert f"name the GGUF file itself, such as {tmp_path / 'q4.gguf'}" in said(model=str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "some-one/some_model.v2"])
def test_a_name_of_the_hub_is_no_folder_and_nothing_is_downloaded(name: str) -> None:
    line = said(model=name)
    assert "nothing is downloaded" in line
    assert f"hf download {name}`" in line


def test_what_is_refused_costs_no_import_of_torch(tmp_path: Path) -> None:
    """All in one process, whose start takes the most time."""
    code = (
        "import json, sys; from engine.__main__ import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    print('status', main(words)); assert 'torch' not in sys.modules, words"
    )
    root = Path(__file__).parents[3]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        commands = [
            ["serve", str(tmp_path)],
            ["serve", "--port", port],
            ["replay", str(tmp_path / "x")],
            ["serve", "--help"],
        ]
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, cwd=root, check=False
        )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == [*["status 2"] * 3, "status 0"]
    assert f"127.0.0.1:{port} (--host, --port): address already in use" in done.stderr


def test_a_trace_that_cannot_be_written_is_told_and_one_that_is_there_stays(tmp_path: Path) -> None:
    assert "is a folder" in said(trace=tmp_path)
    assert f"there is no folder {tmp_path / 'no'}" in said(trace=tmp_path / "no" / "x.jsonl")
    assert "too long" in said(trace=tmp_path / ("x" * 300))
    kept = tmp_path / "kept.jsonl"
    kept.write_text("yesterday's")
    prepare_options(build_options(trace=kept))
    assert kept.read_text() == "yesterday's"
    prepare_options(build_options(trace=tmp_path / "new.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_what_is_forbidden_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "permission denied" in said(trace=tmp_path / "x")
    assert "permission denied" in said(kv_cache_dir=tmp_path / "kv")


def test_a_cache_folder_that_cannot_be_used_is_told_and_none_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert "Not a directory" in said(kv_cache_dir=file)
    assert "is not a folder" in said(kv_cache_dir=file / "a" / "b")
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert "--kv-cache-dir" in said(kv_cache_dir=link)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "others may write there" in said(kv_cache_dir=shared)
    prepare_options(build_options(kv_cache_dir=tmp_path / "new" / "kv"))
    assert not (tmp_path / "new").exists(), "what was made to try it is gone again"
    shared.chmod(0o700)
    prepare_options(build_options(kv_cache_dir=shared))
    assert not (tmp_path / "new").exists()
    assert not list(shared.iterdir())


def test_a_cache_folder_that_another_process_uses_is_told(tmp_path: Path) -> None:
    from adapters.store.files.private_folder import LOCK  # noqa: PLC0415

    tmp_path.chmod(0o700)
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process" in said(kv_cache_dir=tmp_path)
    prepare_options(build_options(kv_cache_dir=tmp_path))


def test_a_draft_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "--draft no/draft: no such folder or file" in said(draft="no/draft")
    file = gguf(tmp_path / "draft.gguf")
    assert prepare_options(build_options(draft=str(file))).speculation.draft == str(file)


def test_keys_come_from_a_file_and_are_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n  second \r\n")
    file.chmod(0o600)
    options = prepare_options(build_options(api_key=("flag",), api_key_file=file))
    assert options.http.api_key == ("flag", "first", "second")
    assert "second" not in repr(options.redacted_values())
    assert not caplog.records
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "rekindle"):
        assert prepare_options(options).http.api_key
    assert "chmod 600" in caplog.text
    assert "second" not in caplog.text


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"", "holds no key"), (b"\n \n", "holds no key"), (b"ok\nk\xc3\xa9y\n", "key 2 is not"), (b"x" * 2**21, "KiB")],
    ids=["empty", "blank", "not ASCII", "large"],
)
def test_a_file_without_good_keys_is_told(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    assert part in said(api_key_file=file)
    assert "--api-key-file" in said(api_key_file=tmp_path / "none")
    assert "is a directory" in said(api_key_file=tmp_path)


def test_the_command_tells_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["serve", "Qwen/Qwen3-0.6B"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rekindle: Qwen/Qwen3-0.6B: no such folder")


def test_a_device_for_no_draft_is_refused() -> None:
    assert said(draft="none", draft_device="cpu") == (
        "--draft-device cpu has no effect with --draft none: leave one out"
    )


@pytest.mark.parametrize("path", ["/proc/kv", "/proc", "/sys/kv", "LONG"])
def test_a_cache_folder_is_tried_before_anything_is_loaded(path: str, tmp_path: Path) -> None:
    """Rights alone do not say: root may write everywhere, but not in a file system of the kernel's."""
    where = str(tmp_path / ("x" * 300)) if path == "LONG" else path
    assert said(kv_cache_dir=Path(where)).startswith(f"--kv-cache-dir {where}: ")
    assert not list(tmp_path.iterdir())


def test_a_shared_tier_without_its_package_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    message = said(kv_shared_tier="s3://bucket/x")
    assert message.startswith("--kv-shared-tier s3://bucket/x: ")
    assert "rekindle[shared]" in message
