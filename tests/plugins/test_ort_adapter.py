"""Graphs of one node in ONNX Runtime: the adapter's answer is the C ABI's, and its refusals name the node."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_cases import Heads, Pool, rows_of, step
from numpy.typing import NDArray

from enginebay.plugins import ops
from enginebay.plugins.load import KernelLibrary, library_path

ELEMENTS = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int32": onnx.TensorProto.INT32,
    "uint8": onnx.TensorProto.UINT8,
}


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary()


def session_of(
    op: str,
    inputs: dict[str, NDArray[Any]],
    attributes: dict[str, Any],
    threads: int = 2,
    cache: str = "float32",
) -> ort.InferenceSession:
    """One node called `the_node`, every dimension of its tensors free."""
    table = ops.op(op)
    names = [p.name if p.name in inputs else "" for p in table.inputs]
    while names and not names[-1]:
        names.pop()
    node = onnx.helper.make_node(
        op, names, [p.name for p in table.outputs], name="the_node", domain=ops.DOMAIN, **attributes
    )
    values = [
        onnx.helper.make_tensor_value_info(
            name, ELEMENTS[array.dtype.name], [f"{name}_{i}" for i in range(array.ndim)]
        )
        for name, array in inputs.items()
    ]
    results = [
        onnx.helper.make_tensor_value_info(
            p.name, ELEMENTS[cache if p.name == "cache_out" else "float32"], [None] * len(p.shape)
        )
        for p in table.outputs
    ]
    graph = onnx.helper.make_graph([node], "one", values, results)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(ops.DOMAIN, ops.OPSET)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def value_of(array: NDArray[Any]) -> ort.OrtValue:
    """An OrtValue over the array's own memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENTS["bfloat16"])
    return ort.OrtValue.ortvalue_from_numpy(array)


def bound_run(session: ort.InferenceSession, inputs: dict[str, NDArray[Any]], cache: ort.OrtValue) -> Any:
    """Run with the cache bound to both ends; the attention output."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    binding.bind_ortvalue_input("cache", cache)
    binding.bind_output("attention", "cpu")
    binding.bind_ortvalue_output("cache_out", cache)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()


HEADS = Heads(num_heads=6, num_kv_heads=2, head_dim=32, rotary_dim=16, qk_norm=True, sinks=True)
MIX = [(0, 0), (90, 1), (40, 70), (0, 200)]


def attention_inputs(
    library: KernelLibrary, rng: np.random.Generator, heads: Heads, dtype: Any
) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
    pool = Pool(heads, rng, block_size=16, dtype=dtype)
    pool.cache[:] = rng.normal(size=pool.cache.shape).astype(dtype)
    table = pool.table([s + c for s, c in MIX], 20)
    now = step([rows_of(rng, heads, c) for _, c in MIX], [s for s, _ in MIX], table, 16, padding=5)
    return {**now, **heads.constants(rng)}, pool.cache


def attributes_of(heads: Heads) -> dict[str, Any]:
    return {k: int(v) if isinstance(v, bool) else v for k, v in heads.keywords().items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_attention(library: KernelLibrary, dtype: Any, threads: int) -> None:
    rng = np.random.default_rng()
    inputs, cache = attention_inputs(library, rng, HEADS, dtype)
    wanted_cache = cache.copy()
    wanted = library.run_attention(cache=wanted_cache, **inputs, **HEADS.keywords())
    session = session_of(
        "PagedAttention", {**inputs, "cache": cache}, attributes_of(HEADS), threads, cache.dtype.name
    )
    value = value_of(cache)
    got = bound_run(session, inputs, value)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(cache.view(np.uint8), wanted_cache.view(np.uint8))


def test_unbound_cache_is_refused(library: KernelLibrary) -> None:
    rng = np.random.default_rng()
    inputs, cache = attention_inputs(library, rng, HEADS, np.float32)
    session = session_of("PagedAttention", {**inputs, "cache": cache}, attributes_of(HEADS))
    before = cache.copy()
    with pytest.raises(Exception, match=r"the_node.*cache_out is another buffer than cache"):
        session.run(None, {**inputs, "cache": cache})
    np.testing.assert_array_equal(cache, before)


def test_no_tokens_at_all(library: KernelLibrary) -> None:
    rng = np.random.default_rng()
    heads = Heads()
    pool = Pool(heads, rng, block_size=16)
    table = np.full((2, 3), -1, np.int32)
    inputs = {**step([rows_of(rng, heads, 0)] * 2, [0, 0], table, 16), **heads.constants(rng)}
    session = session_of("PagedAttention", {**inputs, "cache": pool.cache}, attributes_of(heads))
    assert bound_run(session, inputs, value_of(pool.cache)).shape == (0, 4 * 32)
