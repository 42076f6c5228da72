"""Options: flags, environment and file, in that order; each mistake is one sentence that names the flag."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import engine.__main__ as command
from adapters import demo
from adapters.text.answer.answer_parser import REASONING_PARSERS, TOOL_PARSERS
from effects.scope import Scope
from engine.settings.option_types import ReasoningParser, ToolParser
from engine.settings.options import Options, build_options, flat_values


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Return a list that takes the options of each `serve`, which is not carried out."""
    seen = list[Options]()

    def run(options: Options, *_: object) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("engine.loading.background_load.begin_load", lambda *_: None)
    monkeypatch.setattr("engine.serving.serve.run_server", run)
    return seen


def test_without_arguments_the_demo_is_served_on_loopback(served: list[Options]) -> None:
    assert command.main(["serve"]) == 0
    assert served == [Options()]
    assert (served[0].model.model, served[0].http.host, served[0].http.port) == ("demo", "127.0.0.1", 8000)


def test_flags_win_over_environment_and_that_over_the_file(
    served: list[Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rekindle.toml"
    file.write_text('port = 1\nslots = 3\nmax-queue = 7\napi-key = ["one", "two"]\n')
    monkeypatch.setenv("REKINDLE_PORT", "2")
    monkeypatch.setenv("REKINDLE_SLOTS", "5")
    assert command.main(["serve", "--port", "9", "--config", str(file)]) == 0
    assert (served[0].http.port, served[0].runtime.slots, served[0].http.max_queue, served[0].http.api_key) == (
        9,
        5,
        7,
        ("one", "two"),
    )


FREEZING = ("--disk-prefix-cache-compress", "--prefill-compression", "auto", "--prefill-drafter", "demo")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], ["--port", "65535"]),
        (["--port", "x"], ["--port", "int"]),
        (["--slots", "1.5"], ["--slots", "'1.5' is not an integer"]),
        (["--slots", "1_0"], ["--slots", "'1_0' is not an integer"]),
        (["--slots", "9" * 5000], ["--slots", "integer"]),
        (["--allow-host", "name:80"], ["--allow-host", "without a port"]),
        (["--slots", "-1"], ["--slots", ">= 0"]),
        (["--slots", "65"], ["--slots", "<= 64"]),
        (["--latency-target", "-1"], ["--latency-target", ">= 0"]),
        (["--latency-target", "1001"], ["--latency-target", "<= 1000"]),
        (["--latency-target", "2.5"], ["--latency-target", "'2.5' is not an integer"]),
        (["--latency-target", "soon"], ["--latency-target", "'soon' is not an integer"]),
        (["--chunk", "100"], ["--chunk", "power of two"]),
        (["--device", "tpu"], ["--device", "auto, cpu, cuda"]),
        (["--target-devices", "cpu:0,,cpu:0"], ["--target-devices", "'' is no device", "cpu:0, cuda:N"]),
        (["--target-devices", "cpu:0,xpu:0"], ["--target-devices", "'xpu:0' is no device", "cuda:N", "ipc+cpu:0"]),
        (["--target-devices", "ipc+auto"], ["--target-devices", "'ipc+auto' is no device"]),
        (["--target-devices", "ipc+hip:0"], ["--target-devices", "'ipc+hip:0' is no device"]),
        (["--target-devices", "ipc+cpu:1"], ["--target-devices", "'ipc+cpu:1': all processors are one device"]),
        (["--target-devices", "tcp://host"], ["--target-devices", "'tcp://host' is no device", "tcp://HOST:PORT"]),
        (["--target-devices", "tcp://host:70000"], ["--target-devices", "'tcp://host:70000' is no device"]),
        (["--target-devices", "tcp://host:0"], ["--target-devices", "'tcp://host:0' is no device"]),
        (["--target-devices", "hip:0"], ["hip:N", "--target-shard-ipc-python"]),
        (["--draft-device", "ipc+hip:0"], ["--draft-device", "'ipc+hip:0' is no device of a draft"]),
        (
            ["--draft-device", "ipc+cpu:0,cpu"],
            ["--draft-device", "'ipc+cpu:0,cpu' is no device of a draft", "ipc+cuda:N"],
        ),
        (["--draft-device", "hip:1"], ["hip:N", "--target-shard-ipc-python"]),
        (["--prefill-drafter-device", "hip:1"], ["hip:N", "--target-shard-ipc-python"]),
        (
            ["--prefill-drafter-device", "tcp://host"],
            ["--prefill-drafter-device", "'tcp://host' is no device"],
        ),
        (["--shard-secret-file", "x"], ["--shard-secret-file", "tcp://HOST:PORT", "there are none"]),
        (["--target-devices", "cuda:-1"], ["--target-devices", "'cuda:-1' is no device"]),
        (["--target-devices", "cuda:1x"], ["--target-devices", "'cuda:1x' is no device"]),
        (["--target-devices", "cpu:1"], ["--target-devices", "'cpu:1': all processors are one device"]),
        (["--target-devices", "cpu,cpu", "--device", "cpu"], ["--target-devices", "--device cpu", "leave one out"]),
        (["--target-layer-split", "1,1"], ["--target-layer-split", "--target-devices", "name the devices"]),
        (["--target-devices", "cpu,cpu", "--target-layer-split", "1"], ["--target-layer-split 1", "2 devices"]),
        (["--target-devices", "cpu,cpu", "--target-layer-split", "1,0"], ["--target-layer-split", "'0' is no weight"]),
        (["--target-devices", "cpu", "--target-layer-split", "nan"], ["--target-layer-split", "'nan' is no weight"]),
        (
            ["--target-devices", "cpu", "--target-layer-split", "1e999"],
            ["--target-layer-split", "finite numbers above 0"],
        ),
        (["--target-devices", "cpu", "--target-layer-split", "1,,2"], ["--target-layer-split", "'' is no weight"]),
        (["--dtype", "int4"], ["--dtype", "bfloat16"]),
        (["--prefill-compression", "on"], ["--prefill-compression", '"off", "auto", "always"']),
        (
            ["elsewhere", "--prefill-compression", "auto"],
            ["--prefill-compression auto", "name one with --prefill-drafter"],
        ),
        (["--disk-prefix-cache-compress"], ["--disk-prefix-cache-compress", "accepted there: auto, always"]),
        (
            [*FREEZING, "--kv-cache-budget", "0"],
            ["--disk-prefix-cache-compress", "--kv-cache-budget 0", "leave one out"],
        ),
        (["--prefill-drafter-device", "cpu"], ["--prefill-drafter-device", "name one with --prefill-drafter"]),
        (["--draft-device", "xpu"], ["--draft-device", "auto, cpu, cuda or cuda:N", "ipc+cpu:0"]),
        (["--prefill-drafter-device", "tpu"], ["--prefill-drafter-device", "auto, cpu, cuda"]),
        (["--prefill-threshold", "-1"], ["--prefill-threshold", "0"]),
        (["--prefill-threshold", "1e4"], ["--prefill-threshold", "'1e4' is not an integer"]),
        (["--prefill-keep-ratio", "0"], ["--prefill-keep-ratio", "0.001"]),
        (["--prefill-keep-ratio", "1.1"], ["--prefill-keep-ratio", "1"]),
        (["--prefill-curve", "1000"], ["--prefill-curve", "'1000' is not TOKENS:RATIO"]),
        (["--prefill-curve", "1000:0.5,x:0.1"], ["--prefill-curve", "'x:0.1' is not TOKENS:RATIO"]),
        (["--prefill-curve", "1000:0"], ["--prefill-curve", "ratios from 0.001 to 1"]),
        (["--prefill-curve", "1000:2"], ["--prefill-curve", "ratios from 0.001 to 1"]),
        (["--prefill-curve", "1000:nan"], ["--prefill-curve", "'1000:nan' is not TOKENS:RATIO"]),
        (["--prefill-curve", "2000:0.5,1000:0.1"], ["--prefill-curve", "in ascending order"]),
        (["--prefill-curve", "1000:0.5,1000:0.1"], ["--prefill-curve", "every number of tokens once"]),
        (["--numerics", "maybe"], ["--numerics", "exact", "fast"]),
        (["--draft-residency", "lazy"], ["--draft-residency", "auto, persistent, request-scoped"]),
        (["--draft-residency", "AUTO"], ["--draft-residency", "auto, persistent, request-scoped"]),
        (["--draft-residency="], ["--draft-residency", "auto, persistent, request-scoped"]),
        (["--lazy-draft", "--draft-residency", "persistent"], ["--lazy-draft", "--draft-residency", "persistent"]),
        (["--request-timeout", "-1"], ["--request-timeout", "> 0"]),
        (["--request-timeout", "nan"], ["--request-timeout"]),
        (["--max-body", "0"], ["--max-body", ">= 1"]),
        (["--max-queue", "-3"], ["--max-queue", ">= 0"]),
        (["--api-key", ""], ["--api-key", "empty"]),
        (["--host", "a b"], ["--host", "127.0.0.1"]),
        (["--alias", " "], ["--alias", "printable"]),
        (["--alias", "x" * 201], ["--alias", "200"]),
        (["--allow-origin", "page.example"], ["--allow-origin", "https://page.example"]),
        (["--allow-origin", "https://page.example/"], ["--allow-origin", "without a path"]),
        (["--allow-origin", "https://a b"], ["--allow-origin"]),
        (["--disk-prefix-cache", "off", "--kv-cache-dir", "x"], ["--disk-prefix-cache off", "--kv-cache-dir"]),
        (["--api-key-file", "no/keys"], ["--api-key-file no/keys", "no such file"]),
        (["--disk-prefix-cache", "some"], ["--disk-prefix-cache", '"off", "full", "auto", "auto:N" or N', "1000000"]),
        (["--disk-prefix-cache", "auto:0"], ["--disk-prefix-cache", "auto:N"]),
        (["--disk-prefix-cache", "auto:"], ["--disk-prefix-cache", "auto:N"]),
        (["--disk-prefix-cache", "0"], ["--disk-prefix-cache", "N from 1"]),
        (["--disk-prefix-cache=-5"], ["--disk-prefix-cache", "N from 1"]),
        (["--disk-prefix-cache", "1e3"], ["--disk-prefix-cache", "N from 1"]),
        (["--disk-prefix-cache="], ["--disk-prefix-cache", "N from 1"]),
        (["--kv-cache-interval", "-1"], ["--kv-cache-interval", ">= 0"]),
        (["--kv-cache-interval", "1.5"], ["--kv-cache-interval", "'1.5' is not an integer"]),
        (["--kv-cache-cold-max", "many"], ["--kv-cache-cold-max", "integer"]),
        (["--kv-cache-min-tokens", "0.5"], ["--kv-cache-min-tokens", "integer"]),
        (["--kv-cache-codec", "gzip"], ["--kv-cache-codec", "auto", "zstd", "store"]),
        (["--kv-cache-budget", "-1"], ["--kv-cache-budget", ">= 0"]),
        (["--host-cache-budget", "x"], ["--host-cache-budget", "int"]),
        (["--max-ctx", "-1"], ["--max-ctx"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["demo", "other"], ["other"]),
        (["--config", "no/such.toml"], ["no/such.toml"]),
    ],
)
def test_mistakes_name_the_flag_and_what_is_accepted(
    words: list[str], said: list[str], served: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert all(part in error for part in said), error
    assert not served


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ([], "auto"),
        (["--draft-residency", "persistent"], "persistent"),
        (["--draft-residency", "request-scoped"], "request-scoped"),
        (["--draft-residency=request_scoped"], "request-scoped"),
        (["--lazy-draft"], "request-scoped"),
        (["--lazy-draft", "--draft-residency", "request-scoped"], "request-scoped"),
    ],
)
def test_a_draft_stays_or_goes_as_the_flags_say(words: list[str], policy: str, served: list[Options]) -> None:
    assert command.main(["serve", *words]) == 0
    assert served[0].speculation.residency_policy == policy


def test_every_parser_that_there_is_can_be_chosen(served: list[Options]) -> None:
    assert get_args(ToolParser) == ("auto", *TOOL_PARSERS)
    assert get_args(ReasoningParser) == ("auto", *REASONING_PARSERS)
    assert command.main(["serve", "--tool-parser", "qwen-xml", "--reasoning-parser", "none"]) == 0
    assert (served[0].model.tool_parser, served[0].model.reasoning_parser) == ("qwen-xml", "none")
    assert command.main(["serve", "--tool-parser", "qwen_xml"]) == 2


def test_prompts_may_be_left_alone(served: list[Options]) -> None:
    assert command.main(["serve"]) == 0
    assert command.main(["serve", "--stabilize", "off"]) == 0
    assert [options.http.stabilize for options in served] == ["known", "off"]
    assert command.main(["serve", "--stabilize", "all"]) == 2


def test_names_and_origins_may_be_given_several_times(served: list[Options]) -> None:
    words = ["--alias", "gpt-4o", "--alias", "a/b", "--any-model", "--allow-origin", "https://Page.example:8443"]
    assert command.main(["serve", *words, "--allow-origin", "*", "--allow-origin", "http://[::1]:3000"]) == 0
    assert (served[0].model.alias, served[0].model.any_model) == (("gpt-4o", "a/b"), True)
    assert served[0].http.allow_origin == ("https://Page.example:8443", "*", "http://[::1]:3000")


def test_a_mistake_in_the_environment_names_the_variable(
    served: list[Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_PORT", "77777")
    assert command.main(["serve"]) == 2
    assert "REKINDLE_PORT" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize("text", ["port = ", "no-such = 1", 'port = "many"', "[serve]\nport = 1"])
def test_a_mistake_in_the_file_is_told(
    text: str, served: list[Options], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert command.main(["serve", "--config", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not served


def test_keys_are_never_shown() -> None:
    shown = build_options(api_key=("kept-quiet",)).redacted_values()
    assert "kept-quiet" not in repr(shown)
    assert shown.keys() == flat_values(Options()).keys()


def test_help_tells_every_flag_its_default_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["serve", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in flat_values(Options()):
        flag = name.replace("_", "-")
        assert f"--{flag}" in shown
        assert f"REKINDLE_{name.upper()}" in shown


def test_the_diagram_is_mermaid(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["diagram"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("stateDiagram-v2\n")
    assert "Speculating --> Draining : Cancelled" in shown


@pytest.mark.parametrize(
    ("word", "scope"),
    [
        ("full", Scope("full")),
        ("FULL", Scope("full")),
        ("auto", Scope("auto", 30)),
        ("auto:8", Scope("auto", 8)),
        ("Auto:8", Scope("auto", 8)),
        ("1000", Scope("fixed", 1000)),
        ("off", Scope("full")),  # of what host memory keeps; the disk is not used
    ],
)
def test_how_much_is_kept_can_be_said_in_words_and_numbers(word: str, scope: Scope, served: list[Options]) -> None:
    assert command.main(["serve", "--disk-prefix-cache", word]) == 0
    assert (served[0].cache.default_scope, served[0].cache.disk_prefix_cache) == (scope, word)


def test_a_file_may_give_a_scope_as_a_number(served: list[Options], tmp_path: Path) -> None:
    file = tmp_path / "rekindle.toml"
    file.write_text("disk-prefix-cache = 1000\nkv-cache-cold-max = 0\nkv-cache-interval = 0\n")
    assert command.main(["serve", "--config", str(file)]) == 0
    assert served[0].cache.default_scope == Scope("fixed", 1000)
    assert (served[0].checkpoints.kv_cache_cold_max, served[0].checkpoints.kv_cache_interval) == (0, 0)


def test_the_defaults_of_what_is_worth_keeping(served: list[Options]) -> None:
    assert command.main(["serve"]) == 0
    assert (
        served[0].checkpoints.kv_cache_cold_max,
        served[0].checkpoints.kv_cache_interval,
        served[0].cache.kv_cache_min_tokens,
    ) == (
        10240,
        10240,
        512,
    )


@pytest.mark.parametrize(
    ("curve", "points"),
    [
        ("", ()),
        ("10000:0.5, 40000:.2,100000:1", ((10000, 500), (40000, 200), (100000, 1000))),
        ("0:1.0", ((0, 1000),)),
    ],
)
def test_a_curve_of_ratios_is_read_in_thousandths(curve: str, points: tuple[tuple[int, int], ...]) -> None:
    assert build_options(prefill_curve=curve).compression.keep_ratio_curve == points


def test_a_demo_scores_with_the_drafter_that_it_comes_with_unless_nothing_is_to_be_left_out() -> None:
    assert Options().scorer_name == ""
    assert build_options(prefill_compression="auto").scorer_name == str(demo.DRAFTER)
    assert build_options(model="demo-hybrid", prefill_compression="always").scorer_name == str(demo.DRAFTER)
    assert build_options(prefill_drafter="elsewhere").scorer_name == "elsewhere"
    assert (demo.DRAFTER / "config.json").is_file()
