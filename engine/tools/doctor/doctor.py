"""Prints findings as they are made. The exit status is 1 if a fault keeps a server from working as it should."""

from __future__ import annotations

import json
import os

import attrs
from rich.console import Console
from rich.text import Text as Line

from engine.settings.options import Options
from engine.settings.output.progress import announce_if_slow
from engine.tools.doctor.examine_machine import examine_machine
from engine.tools.doctor.findings import Finding, Verdict

STYLES: dict[Verdict, str] = {"well": "green", "warning": "yellow", "fault": "red"}
WIDE = 13  # columns for the subject of a finding


def run_doctor(options: Options, *, as_json: bool) -> int:
    """Examine the machine and print the findings. Return the exit status. Raises UserError."""
    out = Console()
    found = list[Finding]()
    watched = Console(stderr=True)
    with watched.status("examining") if watched.is_terminal else announce_if_slow("examining"):
        for finding in examine_machine(options, os.environ):
            found.append(finding)
            if not as_json:
                print_findings(out, finding)
    sound = all(finding.verdict != "fault" for finding in found)
    if as_json:
        print(json.dumps({"sound": sound, "findings": [describe_finding(finding) for finding in found]}, indent=2))
    return 0 if sound else 1


def describe_finding(finding: Finding) -> dict[str, str]:
    """Return a finding as --json prints it."""
    return attrs.asdict(finding)


def print_findings(out: Console, finding: Finding) -> None:
    line = Line(f"{finding.about:{WIDE}}")
    line.append(f"{finding.verdict:{WIDE - 4}}", style=STYLES[finding.verdict])
    line.append(finding.summary)
    out.print(line, soft_wrap=True)
    if finding.remedy:
        out.print(Line(f"{'':{2 * WIDE - 4}}{finding.remedy}", style="bold"), soft_wrap=True)
