"""Checkpoints that are not safetensors: PyTorch pickles, loaded without running code, and GGUF.

They become safetensors in a scratch folder: pickles a shard at a time, a GGUF Llama a tensor at a time. Other
GGUF models, and tokenizers that export/gguf_tokenizer.py does not know, are read by transformers; such models
are once whole in memory, and their blocks become numbers. torch and transformers are imported only here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginebay.export.checkpoint import INDEX, SINGLE, shard_names
from enginebay.export.errors import CheckpointError, ExportError
from enginebay.export.gguf_header import shown
from enginebay.export.gguf_model import GgufModel, read_gguf, write_folder
from enginebay.export.gguf_tokenizer import known_tokenizer, write_tokenizer
from enginebay.export.staging import scratch_folder

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True)
class Source:
    """Where to read config, safetensors and tokenizer, which files of the user's folder they come from, and
    what the user should know of the conversion."""

    folder: Path
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


@contextmanager
def opened(source: Path, scratch: Path) -> Iterator[Source]:
    """`source` itself where it holds safetensors, else a converted copy below `scratch`, gone afterwards.
    `source` is a folder or a GGUF file.

    Raises ExportError where torch or transformers is needed and absent, CheckpointError for a file that
    cannot be loaded safely.
    """
    if source.is_file():
        with scratch_folder(scratch, ".converted-") as folder:
            yield Source(folder, (source.name,), _convert_gguf(source, folder))
        return
    if (source / SINGLE).exists() or (source / INDEX).exists():
        yield Source(source, ())
        return
    gguf = sorted(path.name for path in source.glob("*.gguf"))
    pickles = _pickles(source)
    if not gguf and not pickles:
        yield Source(source, ())  # opening the checkpoint says what is missing
        return
    with scratch_folder(scratch, ".converted-") as folder:
        if pickles:
            _convert_pickles(source, pickles, folder)
            yield Source(folder, tuple(pickles))
        else:
            if len(gguf) > 1:
                raise ExportError(
                    f"{source} holds {len(gguf)} GGUF files ({', '.join(gguf)}): keep the one to export"
                )
            yield Source(folder, (gguf[0],), _convert_gguf(source / gguf[0], folder))


def _pickles(source: Path) -> list[str]:
    if (source / PICKLE_INDEX).is_file():
        return shard_names(source / PICKLE_INDEX, ".bin")
    return [PICKLE] if (source / PICKLE).is_file() else []


def _convert_pickles(source: Path, names: list[str], folder: Path) -> None:
    """One safetensors shard for each pickle.

    Tensors that share storage are written apart; the export joins them.
    """
    torch, _ = _imports("a pytorch_model.bin")
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for index, name in enumerate(names):
        try:
            # weights_only refuses every pickle that does more than hold tensors.
            tensors = torch.load(source / name, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises what the pickle makes it raise
            # torch's own words advise to load it unsafely.
            raise CheckpointError(
                f"{source / name} cannot be loaded safely: it holds more than tensors, or is "
                "damaged. Nothing of it was run; convert it to safetensors where you trust it"
            ) from error
        if not isinstance(tensors, dict) or not all(torch.is_tensor(value) for value in tensors.values()):
            raise CheckpointError(f"{source / name} is not a table of tensors")
        shard = f"model-{index + 1:05d}-of-{len(names):05d}.safetensors"
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for path in source.iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".txt", ".model", ".jinja")
            and path.name != PICKLE_INDEX
        ):
            shutil.copyfile(path, folder / path.name)


def _convert_gguf(path: Path, folder: Path) -> tuple[str, ...]:
    """A Llama's blocks stay where the kernels have them; the notes say what became of each kind of tensor."""
    model = read_gguf(path)
    if not isinstance(model.meta.get("general.architecture"), str):
        raise CheckpointError(f"{path}: general.architecture is missing; it says what the model is")
    if model.architecture != "llama":
        _convert_through_transformers(path, folder)
        return (
            f"{path.name}: a {shown(model.architecture)}, read by transformers: its blocks became numbers",
        )
    notes = write_folder(model, folder)
    if known_tokenizer(model):
        write_tokenizer(model, folder)
        return notes
    return (*notes, *_save_tokenizer(model, folder))


def _save_tokenizer(model: GgufModel, folder: Path) -> tuple[str, ...]:
    """The tokenizer as transformers reads it, where it can."""
    pre = model.meta.get("tokenizer.ggml.pre", model.meta.get("tokenizer.ggml.model"))
    _, transformers = _imports(f"a GGUF file with tokenizer {shown(pre)}")
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            model.path.parent, gguf_file=model.path.name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot read the tokenizer of {model.path}: {error}") from error
    tokenizer.save_pretrained(folder)
    return (f"tokenizer {shown(pre)} was read by transformers",)


def _convert_through_transformers(path: Path, folder: Path) -> None:
    """Dequantised to float32, which holds every GGUF format's values; tokenizer and template come along."""
    torch, transformers = _imports("a GGUF file of this architecture")
    source, name = path.parent, path.name
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            source, gguf_file=name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot read {path}: {error}") from error
    model.config.quantization_config = None
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _imports(what: str) -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ExportError(
            f"exporting {what} needs torch and transformers ({error}): pip install 'enginebay[torch]'"
        ) from error
    return torch, transformers
