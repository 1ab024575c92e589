"""Finding and refusing kernel libraries."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginebay.plugins import load, ops
from enginebay.plugins.load import KernelLibrary, PluginError, library_hash, library_path, read_op_table


def test_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"not a library")
    monkeypatch.setenv(load.ENVIRONMENT, str(other))
    assert library_path() == other
    assert library_hash() == hashlib.sha256(b"not a library").hexdigest()
    with pytest.raises(PluginError, match=r"other\.so cannot be loaded"):
        KernelLibrary()


def test_missing_library_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(load.ENVIRONMENT, str(tmp_path / "gone.so"))
    with pytest.raises(PluginError, match=r"ENGINEBAY_PLUGIN_LIBRARY=.*gone\.so.*make plugins"):
        library_path()
    monkeypatch.delenv(load.ENVIRONMENT)
    monkeypatch.setattr(load, "PACKAGED", tmp_path / "lib.so")
    with pytest.raises(PluginError, match=r"no plugin library at .*lib\.so.*make plugins"):
        library_path()


def test_the_cuda_adapter_lies_beside_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, adapter = tmp_path / "libenginebay_cuda.so", tmp_path / "libenginebay_ort_cuda.so"
    monkeypatch.setenv(load.CUDA_ENVIRONMENT, str(kernels))
    with pytest.raises(PluginError, match=r"no CUDA plugin library at .*ort_cuda\.so.*make plugins-cuda"):
        load.cuda_adapter_path()
    adapter.touch()
    with pytest.raises(PluginError, match=r"no CUDA plugin library at .*enginebay_cuda\.so"):
        load.cuda_adapter_path()
    kernels.touch()
    assert load.cuda_adapter_path() == adapter


def test_op_tables_that_differ_are_refused() -> None:
    path = Path("lib.so")
    assert read_op_table(path, "PagedAttention=1;QuantLinear=1") == {"PagedAttention": 1, "QuantLinear": 1}
    with pytest.raises(PluginError, match=r"PagedAttention: library 2, ops\.py 1"):
        read_op_table(path, "PagedAttention=2")
    with pytest.raises(PluginError, match=r"Conv: library 1, ops\.py has none"):
        read_op_table(path, "PagedAttention=1;Conv=1")


def test_a_newer_table_refuses_this_library(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = replace(ops.EMBEDDING, version=7)
    monkeypatch.setattr(ops, "OPS", tuple(newer if op.name == newer.name else op for op in ops.OPS))
    with pytest.raises(PluginError, match=r"Embedding: library 1, ops\.py 7"):
        KernelLibrary()


def test_required_ops(library: KernelLibrary) -> None:
    library.require(["PagedAttention", "QuantLinear", "Embedding", "AddRMSNorm", "GatedActivation"])
    with pytest.raises(PluginError, match="no kernel for Conv, Pool; it has PagedAttention"):
        library.require(["PagedAttention", "Pool", "Conv"])


def test_import_is_light() -> None:
    """Serving imports this module: numpy alone, no framework."""
    code = (
        "import sys, enginebay.plugins.load\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'ml_dtypes', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_arguments_are_checked_before_the_call(library: KernelLibrary) -> None:
    values = np.zeros((4, 32), np.uint8)
    scales = np.ones((4, 1), np.float32)
    with pytest.raises(PluginError, match="unknown weight format 'i5'"):
        library.pack_linear(values, scales, format="i5", block_size=32)
    with pytest.raises(PluginError, match=r"values is uint8 \[4, 32\], expected int8 \[4, 32\]"):
        library.pack_linear(values, scales, format="i8", block_size=32)
    with pytest.raises(PluginError, match="minimums missing for format i4, symmetric False"):
        library.pack_linear(values, scales, format="i4", block_size=32, symmetric=False)
    with pytest.raises(PluginError, match="scales given for format f32"):
        library.pack_linear(values.astype(np.float32), scales, format="f32")
    with pytest.raises(PluginError, match=r"scales is float32 \[4, 1\], expected float32 \[4, 2\]"):
        library.pack_linear(np.zeros((4, 64), np.uint8), scales, format="i4", block_size=32)
    with pytest.raises(PluginError, match="contiguous"):
        library.run_gated_activation(np.ones((8, 4), np.float32).T, "silu")
