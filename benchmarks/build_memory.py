"""Peak memory and speed of a build, on a random checkpoint of any size.

    python benchmarks/build_memory.py --parameters 1e9 --quant int4,int8,fp16 [--json]

Makes a bf16 Llama checkpoint, exports it, and builds each recipe in a child process; prints the child's
peak RSS above that of its imports, the largest weight matrix in float32 beside it, and the time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from export_memory import HIDDEN, INTERMEDIATE, VOCAB, make_checkpoint

CHILD = """
import json, resource, sys, time
from pathlib import Path
import onnxruntime
from enginebay.builder.build import BuildConfig, build_engine
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
imports, started = peak(), time.perf_counter()
report = build_engine(Path(sys.argv[1]), Path(sys.argv[2]), BuildConfig(quant=sys.argv[3]))
print(json.dumps({"quant": sys.argv[3], "weight_bytes": report.manifest.weight_bytes, "imports_mb": imports,
                  "peak_rss_mb": peak(), "build_s": time.perf_counter() - started,
                  "bits_per_weight": report.bits_per_weight}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--quant", default="int4,int8,fp16", help="recipes, separated by commas")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="build-memory-", dir=options.folder))
    noise = np.random.default_rng(0).standard_normal(1 << 19).astype(ml_dtypes.bfloat16).tobytes()
    largest = 4 * HIDDEN * max(VOCAB, 2 * INTERMEDIATE) / 2**20
    rows = []
    try:
        (work / "model").mkdir()
        make_checkpoint(work / "model", options.parameters, sparse=False, noise=noise)
        code = "import sys; from pathlib import Path; from enginebay.export.exporter import export_model; "
        code += "export_model(Path(sys.argv[1]), Path(sys.argv[2]))"
        subprocess.run([sys.executable, "-c", code, work / "model", work / "exported"], check=True)
        shutil.rmtree(work / "model")
        for quant in options.quant.split(","):
            command = [sys.executable, "-c", CHILD, work / "exported", work / "engine", quant]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row["above_imports_mb"] = row["peak_rss_mb"] - row["imports_mb"]
            row["largest_matrix_f32_mb"] = largest
            rows.append(row)
            if not options.json:
                print(
                    f"{quant}: {row['weight_bytes'] / 1e9:.2f} GB, {row['bits_per_weight']:.2f} bits, "
                    f"{row['build_s']:.1f} s, peak RSS {row['above_imports_mb']:.0f} MB above the imports "
                    f"(largest matrix in float32: {largest:.0f} MB)",
                    flush=True,
                )
    finally:
        shutil.rmtree(work)
    if options.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
