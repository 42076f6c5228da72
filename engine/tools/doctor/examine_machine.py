"""Collects facts about the machine, its limits, the cache folder and its disk, the port, and the proven numerics."""

from __future__ import annotations

import os
import platform
import resource
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
import torch

from adapters import demo
from adapters.models.numerics.probe_result import SWITCHES
from adapters.models.open_checkpoint import Checkpoint, resolve_dtype
from engine import __version__
from engine.loading.memory.device_survey import choose_devices, free_memory, host_memory, plan_placement
from engine.loading.memory_estimate import choose_fit
from engine.loading.prove_numerics import prove
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_catalog import list_local_models
from engine.settings.options import Options, flat_values
from engine.settings.output.formatting import format_bytes
from engine.settings.paths import find_cache_folder, find_user_folder
from engine.settings.preflight import check_cache_folder
from engine.settings.user_error import UserError
from engine.tools.doctor import findings
from engine.tools.doctor.findings import DiskFacts, Finding

PROBED = 64 << 20  # bytes that are written and read to time a disk
PIECE = 1 << 20
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
DRIVER = Path("/proc/driver/nvidia/version")
PORT = 8000
ASK_S = 2.0


def examine_machine(options: Options, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings as they are made; the last ones take seconds. Raises UserError if a device does not exist."""
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    yield Finding("versions", "well", f"rekindle {__version__}, {python}, {platform.platform(terse=True)}")
    (device,) = dict.fromkeys(choose_devices(options.placement))
    yield findings.judge_device(name_device(device), cuda=torch.cuda.is_available(), driver=DRIVER.exists())
    yield findings.judge_memory(host_memory(), free_memory(torch.device("cpu")), find_container_limit())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield findings.judge_file_limit(None if hard == resource.RLIM_INFINITY else hard)
    ours = sorted(name for name in environment if name.startswith("REKINDLE_"))
    yield findings.judge_environment(ours, list(flat_values(options)))
    yield findings.judge_kernel_switches({name: environment[name] for name in SWITCHES if name in environment})
    yield findings.judge_port(PORT, taken=is_port_taken(PORT), ours=does_server_answer(PORT))
    yield findings.judge_models([model.name for model in list_local_models(environment)])
    yield findings.judge_disk(
        measure_disk(options.cache.kv_cache_dir or find_cache_folder()), options.cache.kv_cache_budget << 20
    )
    yield check_numerics(options)


def name_device(device: torch.device) -> str:
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        capability = f"{about.major}.{about.minor}"
        return f"{device}: {about.name}, {format_bytes(about.total_memory)}, compute capability {capability}"
    return f"cpu: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def find_container_limit() -> int | None:
    for path in LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def is_port_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def does_server_answer(port: int) -> bool:
    """Return whether a model server answers there. One that is loading or wants a key counts as well."""
    try:
        found = httpx2.get(f"http://127.0.0.1:{port}/v1/models", timeout=ASK_S, trust_env=False)
    except httpx2.HTTPError:
        return False
    return found.status_code in {200, 401, 403, 503} and "json" in found.headers.get("content-type", "")


def measure_disk(folder: Path) -> DiskFacts:
    """Measure the disk of the cache folder.

    Nothing is created in the folder itself. The disk is timed with a file in its parent folder, or in the nearest
    ancestor that exists.
    """
    in_use = False
    try:
        check_cache_folder(folder)
    except UserError as error:
        message = str(error).removeprefix("--kv-cache-dir ")
        in_use = "another process is using" in message
        if not in_use:
            return DiskFacts(str(folder), trouble=message)
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    try:
        write, read = time_call(existing)
    except OSError as error:
        return DiskFacts(str(folder), trouble=f"{existing}: {(error.strerror or str(error)).lower()}")
    there = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return DiskFacts(
        str(folder), in_use=in_use, free=shutil.disk_usage(existing).free, kept=sum(there), write=write, read=read
    )


def time_call(folder: Path) -> tuple[float, float]:
    """Return bytes a second of writing until the data is on the disk, and of reading past the page cache.

    Raises OSError.
    """
    # Random bytes, which no disk can compress.
    piece = secrets.token_bytes(PIECE)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(PROBED // PIECE):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(PIECE):
            pass
        ended = time.perf_counter()
    return PROBED / (written - began), PROBED / (ended - start)


def check_numerics(options: Options) -> Finding:
    """Prove the numerics of the demo here, or find an earlier proof."""
    checkpoint = Checkpoint.open(demo.FOLDER)
    dtype = resolve_dtype(options.weights.dtype, checkpoint)
    plan = plan_placement(options.placement, checkpoint.config)
    fit = choose_fit(options, checkpoint.config, dtype, plan, None)
    kept = CalibrationCache(find_user_folder())
    found, _ = prove(options.weights, options.runtime, checkpoint, dtype, plan, context=fit.context, kept=kept)
    message = f"{found.mode}, {found.buckets[0]}..{found.buckets[-1]} rows, class {found.numerics_class}: "
    message += f"{found.checks:,} comparisons of the demo's products in {found.shapes} shapes, bit for bit"
    return findings.judge_numerics(found.mode, message)
