"""Tests of `rekindle doctor`: each problem is shown with its remedy, only faults make the command fail, and nothing is
left behind.
"""

from __future__ import annotations

import fcntl
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.store.files.private_folder import LOCK
from engine.__main__ import main
from engine.tools.doctor import examine_machine, findings
from engine.tools.doctor.examine_machine import does_server_answer, find_container_limit, is_port_taken, measure_disk
from engine.tools.doctor.findings import DiskFacts, Finding
from tests.bench_command.foreign import foreign

GIB = 1 << 30
DISK = DiskFacts("/kv", free=100 * GIB, kept=GIB, write=1e9, read=1e9)


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (findings.judge_disk(DISK, 8 * GIB), "well", ["/kv", "100.0 GiB free"]),
        (
            findings.judge_disk(DiskFacts("/kv", trouble="/kv: is a file"), 8 * GIB),
            "fault",
            ["is a file", "--kv-cache-dir"],
        ),
        (
            findings.judge_disk(DiskFacts("/kv", free=GIB, read=1e9), 8 * GIB),
            "warning",
            ["--kv-cache-budget is 8192 MiB"],
        ),
        (
            findings.judge_disk(DiskFacts("/kv", free=100 * GIB, read=1e6), 8 * GIB),
            "warning",
            ["976.6 KiB/s"],
        ),
        (
            findings.judge_disk(DiskFacts("/kv", in_use=True, free=100 * GIB, read=1e9), GIB),
            "well",
            ["a server is using it"],
        ),
        (findings.judge_memory(32 * GIB, 16 * GIB, None), "well", ["16.0 GiB of 32.0 GiB"]),
        (findings.judge_memory(32 * GIB, 16 * GIB, 64 * GIB), "well", []),
        (findings.judge_memory(32 * GIB, 16 * GIB, 4 * GIB), "warning", ["container may take 4.0 GiB", "--max-ctx"]),
        (findings.judge_memory(32 * GIB, 1 << 20, None), "warning", ["1.0 MiB", "smaller model"]),
        (findings.judge_file_limit(None), "well", ["any number"]),
        (findings.judge_file_limit(20_000), "well", ["20,000"]),
        (findings.judge_file_limit(1024), "warning", ["1024", "ulimit -Hn 8192", "LimitNOFILE"]),
        (findings.judge_device("cpu: AVX2", cuda=False, driver=False), "well", ["cpu: AVX2"]),
        (findings.judge_device("cuda:0: H100", cuda=True, driver=True), "well", ["H100"]),
        (findings.judge_device("cpu: AVX2", cuda=False, driver=True), "warning", ["NVIDIA", "a torch with CUDA"]),
        (findings.judge_port(8000, taken=False, ours=False), "well", ["free"]),
        (findings.judge_port(8000, taken=True, ours=True), "well", ["answers there"]),
        (findings.judge_port(8000, taken=True, ours=False), "warning", ["another program", "--port 8001"]),
        (findings.judge_environment([], ["port"]), "well", []),
        (findings.judge_environment(["REKINDLE_PORT", "REKINDLE_CONFIG"], ["port"]), "well", ["REKINDLE_PORT"]),
        (findings.judge_environment(["REKINDLE_PROT"], ["port"]), "warning", ["REKINDLE_PROT", "mean REKINDLE_PORT?"]),
        (findings.judge_environment(["REKINDLE_XYZ"], ["port"]), "warning", ["unset it"]),
        (findings.judge_kernel_switches({}), "well", []),
        (findings.judge_kernel_switches({"MKL_CBWR": "AVX2"}), "warning", ["MKL_CBWR=AVX2", "class"]),
        (findings.judge_numerics("buckets", "4..256"), "well", ["4..256"]),
        (findings.judge_numerics("grid", "64"), "warning", ["no draft is used"]),
        (findings.judge_models(["a"]), "well", ["1 model in", "`rekindle models`"]),
    ],
)
def test_what_is_not_well_comes_with_its_remedy(found: Finding, verdict: str, said: list[str]) -> None:
    assert found.verdict == verdict
    assert bool(found.remedy) == (verdict != "well")
    assert all(part in f"{found.summary} {found.remedy}" for part in said), found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_machine, "PROBED", examine_machine.PIECE)


def test_a_disk_is_timed_and_nothing_is_left_on_it(tmp_path: Path, small: None) -> None:
    facts = measure_disk(tmp_path / "new" / "kv")
    assert not facts.trouble
    assert min(facts.free, facts.write, facts.read) > 0
    assert facts.kept == 0
    assert not list(tmp_path.iterdir())
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    (folder / "run").write_bytes(bytes(1000))
    assert measure_disk(folder).kept == 1000
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_a_folder_that_cannot_be_used_is_a_fault_and_one_that_is_in_use_is_none(tmp_path: Path, small: None) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder, mode in ((shared, 0o777), (own, 0o700)):
        folder.mkdir()
        folder.chmod(mode)
    assert "others may write there" in measure_disk(shared).trouble
    with (own / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        facts = measure_disk(own)
    assert (facts.in_use, facts.trouble) == (True, "")


@pytest.mark.parametrize(("text", "limit"), [("4294967296\n", 4 * GIB), ("max\n", None), (None, None)])
def test_the_limit_of_a_container_is_read(
    text: str | None, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(examine_machine, "LIMITS", (str(tmp_path / "none"), str(file)))
    assert find_container_limit() == limit


def test_who_has_a_port_is_seen() -> None:
    with foreign() as server:
        assert is_port_taken(server.server_port)
        assert not does_server_answer(server.server_port), "its answers are no JSON by their type"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert not is_port_taken(held.getsockname()[1])
        held.listen()
        assert is_port_taken(held.getsockname()[1])


def run_doctor(capsys: pytest.CaptureFixture[str], status: int, *words: str) -> dict[str, Any]:
    assert main(["doctor", "--device", "cpu", "--json", *words]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] == (status == 0)
    return {one["about"]: one for one in found["findings"]}


def test_it_fails_where_there_is_a_fault(tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_doctor(capsys, 0, "--kv-cache-dir", str(tmp_path / "kv"))
    assert list(found) == [
        *("versions", "device", "memory", "limits", "environment", "kernels", "port", "models", "cache", "numerics")
    ]
    assert torch.__version__ in found["versions"]["summary"]
    assert "bit for bit" in found["numerics"]["summary"]
    file = tmp_path / "file"
    file.write_text("x")
    found = run_doctor(capsys, 1, "--kv-cache-dir", str(file))
    assert (found["cache"]["verdict"], found["numerics"]["verdict"]) == ("fault", "well")
    assert main(["doctor", "--device", "cpu", "--kv-cache-dir", str(file)]) == 1
    out = capsys.readouterr().out
    assert "cache        fault    " in out
    assert "\n                      name a folder of your own with --kv-cache-dir" in out


def test_a_device_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda:97"]) == 2
    assert "cuda:97" in capsys.readouterr().err
