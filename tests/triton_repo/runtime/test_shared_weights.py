"""Two engines of one process over one folder: the packed weights are mapped once and never copied."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tiny_engine import MODEL, build_tiny, export_tiny

SCRIPT = """
import re, sys
from pathlib import Path
from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

def private_kib():
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(n) for n in re.findall(r"Private_(?:Dirty|Clean):\\s+(\\d+)", text))

def copied_kib():  # pages of the file that are this process's own
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mine = [part for part in parts if part.splitlines() and part.splitlines()[0].endswith("weights.bin")]
    return sum(int(n) for part in mine for n in re.findall(r"Anonymous:\\s+(\\d+)", part)), len(mine)

folder, engines = Path(sys.argv[1]), []
for _ in range(2):
    before = private_kib()
    engines.append(OrtEngine(folder, EngineOptions(threads=1, num_blocks=4)))
    print(private_kib() - before, *copied_kib())
"""


def test_a_second_engine_shares_the_weights(tmp_path: Path) -> None:
    exported = export_tiny(tmp_path, model=replace(MODEL, hidden=256, vocab=20_000))
    wide_engine = build_tiny(exported, tmp_path / "engine", "fp32")
    weights_kib = (wide_engine / "weights.bin").stat().st_size // 1024
    assert weights_kib > 16 << 10  # well above what a session costs by itself
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(wide_engine)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(figures) == 2, done.stdout
    for _, copied, mappings in figures:
        assert mappings > 0, "weights.bin is not mapped"
        assert copied == 0, f"{copied} KiB of the mapped weights were copied"
    second, _, _ = figures[1]
    assert second < weights_kib // 2, f"a second engine took {second} KiB; the weights have {weights_kib}"
