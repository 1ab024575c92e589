"""Picks from a Triton log what tells a person why the server or a model did not start."""

from __future__ import annotations

import re

# The Python backend puts the exception of `initialize` here, then an "At:" with the places.
_END = r"(?=\n\s*\n?At:|\n[IWE]\d{4} |\nerror: |\Z)"
_MODEL = re.compile(r"failed to load '([^']+)' version \d+: \w+: (.*?)" + _END, re.DOTALL)
_CONFIG = re.compile(r"Poll failed for model directory '([^']+)': (.*?)" + _END, re.DOTALL)
_EXCEPTION = re.compile(r"^(\w+Error): ")
_LAST_LINES = 15


def model_failures(log: str) -> dict[str, str]:
    """Model name to why it did not load, as the model itself said it."""
    failures: dict[str, str] = {}
    lines = log.replace("\\n", "\n")  # Triton writes the line breaks of a message like that
    for pattern in (_MODEL, _CONFIG):
        for match in pattern.finditer(lines):
            failures.setdefault(match[1], _EXCEPTION.sub("", match[2].strip(' "\n')))
    return failures


def summary(log: str) -> str:
    """The reasons, one paragraph for each model; without any, the errors; without any, the last lines."""
    failures = model_failures(log)
    if failures:
        return "\n".join(f"model '{name}' failed to load: {reason}" for name, reason in failures.items())
    lines = log.splitlines()
    errors = [line for line in lines if re.match(r"E\d{4} |error:|Error:|.*what\(\):", line)]
    return "\n".join((errors or lines)[-_LAST_LINES:]) or "(it wrote no log)"
