"""Reads compiled kernels: how threads hold operands, and a fault of the assembler in machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;")
WRITTEN = re.compile(r"(?:U\S*|R2UR\S*|S2UR\S*)\s+UR(\d+)\b")
LOW = re.compile(r"UIADD3 (UR\d+|URZ), (UP\d), (?!\1,)UR(\d+), \S+, URZ$")
HIGH = re.compile(r"UIADD3\.X UR\d+, UR(\d+), \S+, URZ, (UP\d), !UPT$")

PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
RESULT = re.compile(r"(?!ST|RED|BAR|SYNCS|UTMA|HGMMA)(\S+) (?:P\d+, )?R(\d+)\b")
OPERAND = 4  # registers of the left side of a product


def read_operand_widths(form: Path) -> frozenset[int]:
    """Return how many neighbours along a sum a thread holds, of all operands of products that are in registers.

    form: a kernel in Triton's language for GPUs.
    """
    return frozenset(map(int, re.findall(r"kWidth = (\d+)", form.read_text())))


def disassemble(binary: Path, tool: str) -> str:
    """Return the machine code of a kernel. tool: the path of `nvdisasm`."""
    return subprocess.run([tool, "-c", str(binary)], capture_output=True, check=True, text=True).stdout


def find_torn_sums(code: str) -> list[str]:
    """Return the instructions that add the upper half of 64 bits, and take it from the register of the lower half.

    The assembler of CUDA 12.8 wrote such sums for the addresses of tiles in shared memory, although the halves differ.
    """
    lower = dict[str, int]()  # the register of the lower half, by the predicate that has the carry
    torn = []
    for instruction in INSTRUCTION.findall(code):
        words = " ".join(instruction.split())
        if (high := HIGH.match(words)) and lower.get(high[2]) == int(high[1]):
            torn.append(words)
        if written := WRITTEN.match(words):
            first = int(written[1])
            is_pair = "WIDE" in words or ".64" in words
            lower = {carry: one for carry, one in lower.items() if one != first and not (is_pair and one == first + 1)}
        if low := LOW.match(words):
            lower[low[2]] = int(low[3])
    return torn


def find_overwritten_operands(code: str) -> list[str]:
    """Return the instructions that write registers which a product of the tensor cores still reads.

    A product that is asynchronous reads its left side from registers until a wait for its group has passed.
    """
    groups = list[set[int]]()  # registers of each group of products that may be in flight, the oldest group first
    group = set[int]()
    found = []
    for instruction in INSTRUCTION.findall(code):
        words = " ".join(instruction.split())
        if product := PRODUCT.match(words):
            group |= set(range(int(product[1]), int(product[1]) + OPERAND))
        if words.startswith("HGMMA") and words.endswith("gsb0"):
            groups.append(group)
            group = set[int]()
        elif wait := WAIT.match(words):
            kept = int(wait[1], 16)
            groups = groups[len(groups) - kept :] if kept else []
        elif result := RESULT.match(words):
            count = 4 if ".128" in result[1] else 2 if ".64" in result[1] or "WIDE" in result[1] else 1
            written = set(range(int(result[2]), int(result[2]) + count))
            if not written.isdisjoint(group.union(*groups)):
                found.append(words)
    return found
