"""The options of a fleet, and the file for `serve deploy`."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest
import yaml
from ray.serve.config import AutoscalingConfig

from adapters.store.files.private_folder import PrivateFolder
from engine.__main__ import main
from engine.fleet.application import choose_scaling, configure_router
from engine.fleet.fleet_options import (
    FleetOptions,
    build_replica_words,
    collect_changed_values,
    list_arguments,
    read_gpus,
)
from engine.fleet.ingress.ingress_replica import IngressReplica
from engine.fleet.replica.replica_folder import claim_folder
from engine.fleet.replica.server_process import build_environment
from engine.fleet.serve_file import write_serve_file
from engine.settings.config_file import parse_values
from engine.settings.options import Options, build_options
from engine.settings.server_options import CacheOptions
from engine.settings.user_error import UserError

OPTIONS = build_options(
    model="demo-hybrid", slots=4, alias=("one", "two"), any_model=True, kv_cache_dir=Path("/cache/x"), grace=2.5
)


def test_options_survive_the_way_to_a_replica() -> None:
    assert collect_changed_values(Options()) == {}
    assert parse_values(collect_changed_values(OPTIONS)) == OPTIONS


def test_a_replica_listens_on_its_node_and_answers_to_the_name_of_the_fleet() -> None:
    command, model, *words = build_replica_words(OPTIONS, "10.0.0.7", Path("/claimed"), "abc")
    assert (command, model) == ("serve", "demo-hybrid")
    for word in ("--host=10.0.0.7", "--port=0", "--allow-host=127.0.0.1", "--kv-cache-dir=/claimed/kv", "--slots=4"):
        assert word in words


def test_the_file_for_serve_deploy_has_the_options_that_were_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "demo-hybrid", "--yaml", "--replicas", "3", "--alias", "one", "--port", "81"]) == 0
    file = yaml.safe_load(capsys.readouterr().out)
    assert file["http_options"] == {"host": "0.0.0.0", "port": 81}  # noqa: S104 - as the file has it
    (application,) = file["applications"]
    assert application["import_path"] == "engine.fleet.application:build_fleet"
    assert application["args"] == {"replicas": 3, "options": {"model": "demo-hybrid", "alias": ["one"], "port": 81}}


def test_a_file_of_options_serves_a_fleet_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rekindle.toml").write_text("slots = 3\nreplicas = 5\n")
    assert main(["fleet", "--yaml", "--config", str(tmp_path / "rekindle.toml")]) == 0
    arguments = yaml.safe_load(capsys.readouterr().out)["applications"][0]["args"]
    assert arguments == {"replicas": 5, "options": {"slots": 3}}


def test_a_range_of_replicas_stands_in_the_file_with_its_delays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--yaml", "--replicas", "1..4", "--upscale-delay", "5"]) == 0
    arguments = yaml.safe_load(capsys.readouterr().out)["applications"][0]["args"]
    assert arguments == {"replicas": "1..4", "upscale_delay_s": 5, "downscale_delay_s": 600, "options": {}}
    scaling = choose_scaling(arguments)["autoscaling_config"]
    assert AutoscalingConfig(**scaling).max_replicas == 4
    assert choose_scaling({"replicas": 3}) == choose_scaling({"replicas": "3..3"}) == {"num_replicas": 3}


def test_each_replica_writes_a_trace_of_its_own() -> None:
    options = build_options(trace=Path("/traces/day.jsonl"))
    words = build_replica_words(options, "10.0.0.7", None, "abc")
    assert "--trace=/traces/day-abc.jsonl" in words


def test_reading_prompts_elsewhere_needs_a_shared_tier_and_reaches_the_router() -> None:
    fleet = FleetOptions(prefill_elsewhere=8192)
    with pytest.raises(UserError, match="--kv-shared-tier"):
        list_arguments(build_options(), fleet)
    options = build_options(kv_shared_tier="s3://bucket/x")
    arguments = list_arguments(options, fleet)
    assert arguments["prefill_elsewhere"] == 8192
    assert "prefill_elsewhere" not in list_arguments(options, FleetOptions())
    assert configure_router(arguments).request_router_kwargs == {"remote_prefill_min_tokens": 8192}


def test_a_key_never_stands_in_the_file() -> None:
    with pytest.raises(UserError, match="--api-key-file"):
        write_serve_file(build_options(api_key=("secret",)), FleetOptions())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "replicas"),
        (["--replicas", "4..1"], "accepted: 1 to 512, or a range such as 1..4"),
        (["--replicas", "1.5"], "'1.5'; accepted: 1 to 512"),
        (["--yaml", "--host", "10.0.0.7"], "--host 10.0.0.7 has no effect with --yaml"),
        (["--yaml", "--kv-shared-tier", "ftp://x"], "'ftp://x' is no store; accepted: s3://bucket/prefix"),
    ],
)
def test_wrong_options_get_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", *words]) == 2
    assert message in capsys.readouterr().err


def test_gpus_are_counted_by_the_devices_of_one_replica() -> None:
    assert read_gpus(build_options(device="cpu"), has_gpu=True) == 0
    assert read_gpus(build_options(device="auto"), has_gpu=True) == 1
    assert read_gpus(build_options(device="auto"), has_gpu=False) == 0
    assert read_gpus(build_options(target_devices="cuda:0,cuda:1"), has_gpu=False) == 2


def test_each_replica_claims_a_folder_of_its_own_and_a_new_one_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    cache = CacheOptions(kv_cache_dir=tmp_path)
    claims = [claim_folder(cache) for _ in range(2)]
    assert [claim and claim.path.name for claim in claims] == ["replica-0", "replica-1"]
    assert isinstance(claims[0], PrivateFolder)
    claims[0].close()
    again = claim_folder(cache)
    assert again is not None
    assert again.path.name == "replica-0"
    assert claim_folder(CacheOptions(kv_cache_budget=0)) is None


def test_replicas_use_no_folder_that_others_may_write_to(tmp_path: Path) -> None:
    mount = tmp_path / "mount"  # an emptyDir of Kubernetes looks so
    mount.mkdir()
    mount.chmod(0o777)
    with pytest.raises(UserError, match=f"{mount}: others may write there"):
        claim_folder(CacheOptions(kv_cache_dir=mount))
    before = os.umask(0o002)
    try:
        claim = claim_folder(CacheOptions(kv_cache_dir=mount / "rekindle"))
    finally:
        os.umask(before)
    assert claim is not None
    claim.close()
    assert (mount / "rekindle").stat().st_mode & 0o777 == 0o700
    assert claim_folder(CacheOptions(kv_cache_dir=mount / "rekindle")) is not None


async def test_an_ingress_needs_neither_the_cache_folder_nor_the_trace_of_its_replicas(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    values = {"kv_cache_dir": str(shared), "trace": str(tmp_path / "nowhere" / "day.jsonl")}
    ingress = await anyio.to_thread.run_sync(lambda: IngressReplica(values, None))
    assert ingress.gate.options.cache.kv_cache_dir is None


def test_a_server_gets_its_options_as_words_and_not_from_the_environment() -> None:
    assert build_environment({"REKINDLE_PORT": "1", "OMP_NUM_THREADS": "1", "PATH": "/bin"}) == {"PATH": "/bin"}
