"""Turns facts that were collected elsewhere into findings with remedies."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import frozen

from engine.settings.output.formatting import format_bytes, format_count

Verdict: TypeAlias = Literal["well", "warning", "fault"]
FILES = 8192  # descriptors that a server requests
# The free memory in bytes that loading a model needs at least.
SCARCE = 1 << 30
# Bytes a second. At this speed a block of a 4B model, 9 MB, takes 0.1 s, as long as computing its 64 tokens at 700 a
# second.
SLOW = 100e6


@frozen
class Finding:
    """One finding. remedy: what a person can do about it; empty if all is well."""

    about: str
    verdict: Verdict
    summary: str
    remedy: str = ""


@frozen
class DiskFacts:
    """Facts about the folder of the prefix cache, in bytes and bytes a second. trouble: why it cannot be used."""

    folder: str
    trouble: str = ""
    in_use: bool = False
    free: int = 0
    kept: int = 0
    write: float = 0.0
    read: float = 0.0


def judge_disk(facts: DiskFacts, budget: int) -> Finding:
    if facts.trouble:
        remedy = "name a folder of your own with --kv-cache-dir, or serve with --disk-prefix-cache off"
        return Finding("cache", "fault", facts.trouble, remedy)
    summary = f"{facts.folder}: {format_bytes(facts.kept)} kept, {format_bytes(facts.free)} free, "
    summary += f"{format_bytes(facts.write)}/s written, {format_bytes(facts.read)}/s read"
    summary += "; a server is using it" if facts.in_use else ""
    if facts.free + facts.kept < budget:
        remedy = f"--kv-cache-budget is {budget >> 20} MiB: lower it, or put --kv-cache-dir on another disk"
        return Finding("cache", "warning", summary, remedy)
    if facts.read < SLOW:
        remedy = "restoring may take longer than computing: put --kv-cache-dir on a faster disk"
        return Finding("cache", "warning", summary, remedy)
    return Finding("cache", "well", summary)


def judge_memory(total: int, free: int, limit: int | None) -> Finding:
    """Judge the memory of the machine. All in bytes. limit: what a container may take; None: no limit."""
    summary = f"{format_bytes(free)} of {format_bytes(total)} are free"
    if limit is not None and limit < total:
        remedy = "the server counts the memory of the whole machine: set --max-ctx and --slots, or raise the limit"
        return Finding("memory", "warning", f"{summary}; this container may take {format_bytes(limit)}", remedy)
    if free < SCARCE:
        return Finding("memory", "warning", summary, "stop other programs, or serve a smaller model")
    return Finding("memory", "well", summary)


def judge_file_limit(hard: int | None) -> Finding:
    """Judge the limit of open files. None: there is no limit."""
    if hard is not None and hard < FILES:
        remedy = f"`ulimit -Hn {FILES}`, or nofile in /etc/security/limits.conf; with systemd LimitNOFILE={FILES}"
        return Finding("limits", "warning", f"{hard} open files, so fewer connections than 4,096", remedy)
    return Finding("limits", "well", f"{'any number of' if hard is None else f'{hard:,}'} open files")


def judge_device(name: str, *, cuda: bool, driver: bool) -> Finding:
    """Judge the device. cuda: torch can use a GPU. driver: the system has the driver of one."""
    if driver and not cuda:
        remedy = "install a torch with CUDA (https://pytorch.org), and check that `nvidia-smi` works"
        return Finding("device", "warning", f"{name}; there is an NVIDIA GPU that torch cannot use", remedy)
    return Finding("device", "well", name)


def judge_port(number: int, *, taken: bool, ours: bool) -> Finding:
    if taken and not ours:
        return Finding("port", "warning", f"{number} is taken by another program", "serve with --port 8001")
    return Finding("port", "well", f"{number}: {'a server answers there' if taken else 'free'}")


def judge_environment(names: Sequence[str], options: Sequence[str]) -> Finding:
    """Judge the REKINDLE_... variables that are set. One that names no option has no effect, and only this finding says
    so.
    """
    known = {name.upper() for name in (*options, "config")}
    if odd := [name for name in names if name.removeprefix("REKINDLE_") not in known]:
        close = difflib.get_close_matches(odd[0].removeprefix("REKINDLE_"), sorted(known), 1)
        remedy = f"did you mean REKINDLE_{close[0]}?" if close else "unset it, or see `rekindle serve --help`"
        return Finding("environment", "warning", f"unknown: {', '.join(odd)}", remedy)
    return Finding("environment", "well", ", ".join(names) or "no REKINDLE_... variable is set")


def judge_kernel_switches(found: Mapping[str, str]) -> Finding:
    """Judge variables that change which kernels libraries choose, and with them the numerics class."""
    if not found:
        return Finding("kernels", "well", "no variable changes the kernels that libraries choose")
    summary = ", ".join(f"{name}={value}" for name, value in found.items())
    remedy = "these variables change the numerics class, so other prompts are found; unset what you do not need"
    return Finding("kernels", "warning", summary, remedy)


def judge_numerics(mode: str, summary: str) -> Finding:
    if mode == "buckets":
        return Finding("numerics", "well", summary)
    remedy = "answers are exact but slower, and no draft is used: try another --dtype or --threads"
    return Finding("numerics", "warning", summary, remedy)


def judge_models(names: Sequence[str]) -> Finding:
    summary = f"{format_count(len(names), 'model')} in ~/models and the Hugging Face cache, besides the two demo models"
    return Finding("models", "well", f"{summary}; `rekindle models` shows which fit")
