"""Say what this machine can build and run, and why not the rest. Nothing is installed, started or changed.

Exit status 0 where the whole ort-cpu pipeline works here, 1 where something it needs is missing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from enginebay.builder.targets import PLANNED, TARGETS
from enginebay.cli.console import print_json
from enginebay.cli.machine import examine

# Without these the embedded default, ort-cpu behind Triton, does not work; the rest is optional.
ESSENTIAL = {"python", "plugin library", "onnxruntime", "onnx", "tokenizers", "Triton server"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="findings and targets as JSON")


def run(args: argparse.Namespace) -> int:
    findings = examine()
    healthy = all(finding.ok for finding in findings if finding.name in ESSENTIAL)
    targets = dict.fromkeys(TARGETS, "built and run here" if healthy else "something above is missing")
    targets |= PLANNED
    if args.json:
        found = [asdict(finding) for finding in findings]
        print_json({"ok": healthy, "findings": found, "targets": targets})
        return 0 if healthy else 1
    for finding in findings:
        print(f"{'ok     ' if finding.ok else 'missing'}  {finding.name:15} {finding.detail}")
        if not finding.ok:
            print(f"{'':9}{'':15} for {finding.needed_for}: {finding.fix}")
    print()
    for name, words in targets.items():
        print(f"target   {name:15} {words}")
    return 0 if healthy else 1
