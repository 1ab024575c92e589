"""Graphs of one node in ONNX Runtime: the adapter's answer is the C ABI's, and its refusals name the node."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
    "int8": onnx.TensorProto.INT8,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
}


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
    if array.dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ELEMENTS[array.dtype.name])
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
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8]
)
def test_attention(library: KernelLibrary, dtype: Any, threads: int) -> None:
    rng = np.random.default_rng()
    inputs, cache = attention_inputs(library, rng, HEADS, dtype)
    if cache.dtype.name in ("int8", "float8_e4m3fn"):
        channels = (HEADS.head_dim,) if threads == 1 else ()
        inputs["cache_scales"] = rng.uniform(0.01, 0.02, (2, HEADS.num_kv_heads, *channels)).astype(
            np.float32
        )
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


PACKED = {"in_features": 64, "out_features": 40}
FORMATS = {
    "f32": {"format": "f32"},
    "i8": {"format": "i8", "block_size": 32},
    "i4": {"format": "i4", "block_size": 32, "symmetric": 0},
}


def packed_weights(library: KernelLibrary, name: str, rng: np.random.Generator) -> Any:
    keywords: dict[str, Any] = {**FORMATS[name], "symmetric": bool(FORMATS[name].get("symmetric", 1))}
    if name == "f32":
        return library.pack_linear(rng.normal(size=(40, 64)).astype(np.float32), **keywords)
    scales = rng.uniform(0.01, 0.1, (40, 2)).astype(np.float16).astype(np.float32)
    if name == "i8":
        return library.pack_linear(rng.integers(-127, 128, (40, 64)).astype(np.int8), scales, **keywords)
    values = rng.integers(0, 16, (40, 64)).astype(np.uint8)
    return library.pack_linear(values, scales, -8 * scales, **keywords)


@pytest.mark.parametrize("name", FORMATS)
def test_quant_linear_and_embedding(library: KernelLibrary, name: str) -> None:
    rng = np.random.default_rng()
    weight = packed_weights(library, name, rng)
    bias = rng.normal(size=40).astype(np.float32)
    keywords: dict[str, Any] = {**FORMATS[name], "symmetric": bool(FORMATS[name].get("symmetric", 1))}
    x = rng.normal(size=(33, 64)).astype(np.float32)
    attributes = {**PACKED, **FORMATS[name]}
    for inputs in ({"x": x, "weight": weight, "bias": bias}, {"x": x, "weight": weight}):
        session = session_of("QuantLinear", inputs, attributes)
        wanted = library.run_linear(x, weight, inputs.get("bias"), out_features=40, **keywords)
        np.testing.assert_array_equal(session.run(None, inputs)[0], wanted)
        none = session.run(None, {**inputs, "x": x[:0]})[0]
        assert none.shape == (0, 40)

    ids = rng.integers(0, 40, 9).astype(np.int32)
    session = session_of("Embedding", {"input_ids": ids, "weight": weight}, attributes)
    wanted = library.run_embedding(ids, weight, rows=40, columns=64, **keywords)
    np.testing.assert_array_equal(session.run(None, {"input_ids": ids, "weight": weight})[0], wanted)
    assert session.run(None, {"input_ids": ids[:0], "weight": weight})[0].shape == (0, 64)
    with pytest.raises(Exception, match=r"the_node.*40"):
        session.run(None, {"input_ids": np.array([0, 40], np.int32), "weight": weight})


def test_weights_of_another_layout_are_refused(library: KernelLibrary) -> None:
    weight = packed_weights(library, "i4", np.random.default_rng())
    attributes = {**PACKED, **FORMATS["i4"]}
    own = library.linear_layout(rows=40, columns=64, format="i4", block_size=32, symmetric=False)
    x = np.ones((2, 64), np.float32)
    inputs = {"x": x, "weight": weight}
    got = session_of("QuantLinear", inputs, {**attributes, "layout": own}).run(None, inputs)[0]
    np.testing.assert_array_equal(got, session_of("QuantLinear", inputs, attributes).run(None, inputs)[0])
    with pytest.raises(Exception, match=f"the_node.*packed as 'cuda-i4', this library takes '{own}'"):
        session_of("QuantLinear", inputs, {**attributes, "layout": "cuda-i4"})
    with pytest.raises(Exception, match="attribute layout is not a string"):
        session_of("QuantLinear", inputs, {**attributes, "layout": 4})


def test_elementwise(library: KernelLibrary) -> None:
    rng = np.random.default_rng()
    x, residual = rng.normal(size=(2, 7, 48)).astype(np.float32)
    weight = rng.normal(size=48).astype(np.float32)
    inputs = {"x": x, "residual": residual, "weight": weight}
    session = session_of("AddRMSNorm", inputs, {"epsilon": 1e-4})
    wanted = library.run_add_rms_norm(x, residual, weight, 1e-4)
    for got, want in zip(session.run(None, inputs), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    assert session.run(None, {**inputs, "x": x[:0], "residual": residual[:0]})[1].shape == (0, 48)
    for activation in ops.ACTIVATIONS:
        session = session_of("GatedActivation", {"gate_up": x}, {"activation": activation})
        got = session.run(None, {"gate_up": x})[0]
        np.testing.assert_array_equal(got, library.run_gated_activation(x, activation))
        assert session.run(None, {"gate_up": x[:0]})[0].shape == (0, 24)


X64 = np.ones((2, 64), np.float32)
BAD_ATTRIBUTES = {
    "unknown format": (
        "QuantLinear",
        {**PACKED, "format": "i3"},
        "attribute format is 'i3', expected one of f32",
    ),
    "missing format": ("QuantLinear", PACKED, "attribute format is missing"),
    "format of another type": ("QuantLinear", {**PACKED, "format": 4}, "attribute format is not a string"),
    "missing size": (
        "QuantLinear",
        {"in_features": 64, "format": "f32"},
        "attribute out_features is missing",
    ),
    "block size": ("QuantLinear", {**PACKED, "format": "i4", "block_size": 7}, "block_size"),
    "unknown activation": (
        "GatedActivation",
        {"activation": "swish"},
        "attribute activation is 'swish', expected",
    ),
    "missing activation": ("GatedActivation", {}, "attribute activation is missing"),
    "epsilon of another type": ("AddRMSNorm", {"epsilon": 1}, "attribute epsilon is not a float"),
    "too wide an integer": (
        "QuantLinear",
        {**PACKED, "format": "f32", "block_size": 2**40},
        "beyond 32 bits",
    ),
}


@pytest.mark.parametrize("fault", BAD_ATTRIBUTES)
def test_attributes_are_refused_when_the_session_is_created(fault: str) -> None:
    op, attributes, message = BAD_ATTRIBUTES[fault]
    inputs = {
        "QuantLinear": {"x": X64, "weight": np.zeros(9, np.uint8)},
        "GatedActivation": {"gate_up": X64},
        "AddRMSNorm": {"x": X64, "residual": X64, "weight": X64[0]},
    }[op]
    with pytest.raises(Exception, match=f"{op} 'the_node': .*{message}"):
        session_of(op, inputs, attributes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads 5 is no multiple of num_kv_heads 2"),
        ({"window": 4, "causal": 0}, "window 4 with causal 0"),
        ({"softcap": 1}, "attribute softcap is not a float"),
        ({"scale": None}, "attribute scale is missing"),
    ],
)
def test_attention_attributes(library: KernelLibrary, changes: dict[str, Any], message: str) -> None:
    inputs, cache = attention_inputs(library, np.random.default_rng(), HEADS, np.float32)
    attributes = {k: v for k, v in {**attributes_of(HEADS), **changes}.items() if v is not None}
    with pytest.raises(Exception, match=f"PagedAttention 'the_node': .*{message}"):
        session_of("PagedAttention", {**inputs, "cache": cache}, attributes)


ATTENTION_SHAPES = {
    "qkv": (lambda a: a[:, :-1], "dimension 1 of qkv is 319, expected 320"),
    "kv_len": (lambda a: a[:-1], "dimension 0 of kv_len is 3, expected 4"),
    "query_start": (lambda a: a[:-1], "dimension 0 of query_start is 4, expected 5"),
    "slot_mapping": (lambda a: a[:-1], "dimension 0 of slot_mapping is 275, expected 276"),
    "position_ids": (lambda a: a[:-1], "dimension 0 of position_ids is 275, expected 276"),
    "rope_sin": (lambda a: a[:, :-1], "dimension 1 of rope_sin is 7, expected 8"),
    "q_norm": (lambda a: a[:-1], "dimension 0 of q_norm is 31, expected 32"),
    "sinks": (lambda a: a[:-1], "dimension 0 of sinks is 5, expected 6"),
    "block_table": (lambda a: a - 1000, r"block_table\[1\]\[0\] is -"),
}


@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_attention_shapes(library: KernelLibrary, name: str) -> None:
    inputs, cache = attention_inputs(library, np.random.default_rng(), HEADS, np.float32)
    session = session_of("PagedAttention", {**inputs, "cache": cache}, attributes_of(HEADS))
    before = cache.copy()
    break_it, message = ATTENTION_SHAPES[name]
    broken = {**inputs, name: np.ascontiguousarray(break_it(inputs[name]))}
    with pytest.raises(Exception, match=f"the_node.*{message}"):
        bound_run(session, broken, value_of(cache))
    np.testing.assert_array_equal(cache, before)


def test_shapes_of_the_others_are_refused(library: KernelLibrary) -> None:
    weight = packed_weights(library, "f32", np.random.default_rng())
    attributes = {**PACKED, "format": "f32"}
    linear = session_of("QuantLinear", {"x": X64, "weight": weight, "bias": X64[0]}, attributes)
    good = {"x": X64, "weight": weight, "bias": np.ones(40, np.float32)}
    linear.run(None, good)
    for changes, message in (
        ({"x": X64[:, :60].copy()}, "the last of 60 elements; expected 2 and in_features 64"),
        ({"weight": weight[:-4]}, f"weight has {len(weight) - 4} bytes; 40 x 64 .* take {len(weight)}"),
        ({"bias": X64[0]}, "bias has 64 elements, out_features is 40"),
    ):
        with pytest.raises(Exception, match=f"QuantLinear 'the_node': .*{message}"):
            linear.run(None, {**good, **changes})
    norm = session_of("AddRMSNorm", {"x": X64, "residual": X64, "weight": X64[0]}, {})
    with pytest.raises(Exception, match="weight has 63 elements, a row of x 64"):
        norm.run(None, {"x": X64, "residual": X64, "weight": X64[0, :63]})
    with pytest.raises(Exception, match=r"x is \[2, 64\], residual \[1, 64\]"):
        norm.run(None, {"x": X64, "residual": X64[:1], "weight": X64[0]})
    gate = session_of("GatedActivation", {"gate_up": X64}, {"activation": "silu"})
    with pytest.raises(Exception, match="the last of 63 elements"):
        gate.run(None, {"gate_up": np.ones((2, 63), np.float32)})


def test_sessions_on_several_threads(library: KernelLibrary) -> None:
    """Two sessions, four callers: each thread has a workspace of its own."""
    rng = np.random.default_rng()
    cases = []
    for _ in range(4):
        inputs, cache = attention_inputs(library, rng, HEADS, np.float32)
        wanted = library.run_attention(cache=cache.copy(), **inputs, **HEADS.keywords())
        cases.append((inputs, cache, wanted))
    sessions = [
        session_of("PagedAttention", {**cases[0][0], "cache": cases[0][1]}, attributes_of(HEADS))
        for _ in range(2)
    ]

    def call(index: int) -> None:
        inputs, cache, wanted = cases[index]
        value = value_of(cache)
        for _ in range(10):
            np.testing.assert_array_equal(bound_run(sessions[index % 2], inputs, value), wanted)

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(call, range(4)))
