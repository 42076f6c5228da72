"""Devices and weights of `--target-devices` and `--target-layer-split`, and the runs of layers that they give."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from attrs import frozen

DEVICE = re.compile(r"(ipc\+|)(auto|cpu|cuda|hip)(?::(\d{1,4}))?")
ADDRESS = r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})"
RUNNING = re.compile(f"tcp://{ADDRESS}")
LISTENING = re.compile(f"(?:tcp://)?{ADDRESS}")
LISTEN = "tcp://127.0.0.1:7461"
ELSEWHERE = (
    "ipc+cpu:0 or ipc+cuda:N in a process of its own (hip:N in one of another interpreter); "
    "tcp://HOST:PORT of `rekindle shard`"
)
APART = "--target-devices, --draft-device or --prefill-drafter-device"
ACCEPTED = f"cpu:0, cuda:N or auto:N; {ELSEWHERE}; with commas between them"


@frozen
class DeviceLocation:
    """An entry of `--target-devices`.

    device: the name that torch has for it in its process; empty if only that process knows. is_launched: in a child of
    this process. address: of a process that runs already.
    """

    name: str
    device: str = ""
    is_launched: bool = False
    address: tuple[str, int] | None = None

    @property
    def is_remote(self) -> bool:
        return self.is_launched or self.address is not None


def read_location(name: str) -> DeviceLocation:
    """Parse an entry. Raises ValueError."""
    if (running := RUNNING.fullmatch(name)) is not None and 0 < int(running[2]) < 1 << 16:
        return DeviceLocation(name, address=(running[1].strip("[]"), int(running[2])))
    match = DEVICE.fullmatch(name)
    if match is None or (match[1] and match[2] in {"auto", "hip"}):
        raise ValueError(f"{name[:40]!r} is no device here. Accepted: {ACCEPTED}.")
    apart, kind, index = match.groups()
    if kind == "cpu" and int(index or 0):
        raise ValueError(f"{name!r}: all processors are one device. Accepted: {apart}cpu:0, several times if you like.")
    if kind == "hip":  # what a ROCm build of torch calls cuda
        return DeviceLocation(name, f"cuda:{int(index or 0)}", is_launched=True)
    device = "cpu" if kind == "cpu" else name.removeprefix("ipc+")
    return DeviceLocation(name, device, is_launched=bool(apart))


def read_remote_location(name: str) -> DeviceLocation | None:
    """Return the location of a draft or scorer if it is in another process, else None."""
    return read_location(name) if name and not name.startswith(("auto", "cpu", "cuda")) else None


def find_misplacement(entries: Sequence[DeviceLocation], *, interpreter: bool, secret: bool) -> str:
    """Return why options about other processes fit none of these entries, or are missing. Empty if all is right.

    entries: of the options that `APART` names.
    """
    launched = [location for location in entries if location.is_launched]
    if interpreter and not launched:
        return (
            f"--target-shard-ipc-python runs what {APART} have in a process of its own, and there is nothing: name "
            "some, as in ipc+cpu:0"
        )
    if not interpreter and any(location.name.startswith("hip") for location in launched):
        return (
            f"{APART} hip:N is in a process with ROCm's build of torch: name its interpreter with "
            "--target-shard-ipc-python"
        )
    if secret and all(location.address is None for location in entries):
        return f"--shard-secret-file is for shards at tcp://HOST:PORT in {APART}: there are none"
    return ""


def read_listen(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT` or `tcp://HOST:PORT`; port 0 is accepted. Raises ValueError."""
    match = LISTENING.fullmatch(text)
    if match is None or int(match[2]) >= 1 << 16:
        raise ValueError(f"Must be HOST:PORT or tcp://HOST:PORT, such as {LISTEN.removeprefix('tcp://')} or {LISTEN}.")
    return match[1].strip("[]"), int(match[2])


def read_devices(text: str) -> tuple[DeviceLocation, ...]:
    """Parse `cpu:0,cuda:1`: an entry for each shard, in the order of the layers. Raises ValueError."""
    return tuple(read_location(name.strip()) for name in text.split(","))


def read_weights(text: str) -> tuple[float, ...]:
    """Parse `0.08,0.46,0.46`: finite numbers above 0, one for each device. Raises ValueError."""
    found = list[float]()
    for word in text.split(","):
        try:
            weight = float(word.replace("_", "x"))
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"{word.strip()[:40]!r} is no weight. Accepted: finite numbers above 0, with commas between them."
            )
        found.append(weight)
    return tuple(found)


def layer_ranges(layers: int, weights: Sequence[float]) -> tuple[range, ...]:
    """Return a run of layers for each weight, as long as its weight says.

    A run ends where the sum of weights so far puts it, rounded half up, and has at least one layer. Raises ValueError
    for more runs than layers.
    """
    count = len(weights)
    ranges = list[range]()
    begin = 0
    if count > layers:
        raise ValueError(f"{count} shards for {layers} layers; accepted: at most one for each layer")
    *_, total = so_far = list(accumulate(map(Fraction, weights)))
    for number, reached in enumerate(so_far, 1):
        end = math.floor(reached / total * layers + Fraction(1, 2))
        end = min(max(end, begin + 1), layers - (count - number))
        ranges.append(range(begin, end))
        begin = end
    return tuple(ranges)
