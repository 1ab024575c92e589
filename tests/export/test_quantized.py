"""Checkpoints that are quantised already: the packings, and whole models through export and build."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors.numpy import save_file

from enginebay.export.errors import CheckpointError, UnsupportedModelError
from enginebay.export.exporter import export_model
from enginebay.export.packed import pack_nibbles, unpack_awq, unpack_gptq, unpack_rows, unpack_words
from enginebay.export.quantized import read_scheme


def words(values, bits, axis):
    """Independent packing: first value in the lowest bits."""
    per = 32 // bits
    moved = np.moveaxis(np.asarray(values, np.uint64), axis, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, per)
    packed = sum(parts[..., i] << np.uint64(bits * i) for i in range(per)).astype(np.uint32)
    return np.ascontiguousarray(np.moveaxis(packed.view(np.int32), -1, axis))


def dequantized(layer, group):
    """float64 [N, K] in the order of the inputs."""
    expand = lambda a: np.repeat(a.astype(np.float64), group, axis=1)  # noqa: E731
    w = expand(layer.scales) * (layer.values - expand(layer.zeros))
    if layer.order is None:
        return w
    result = np.empty_like(w)
    result[:, layer.order] = w
    return result


@pytest.mark.parametrize(("stored", "first"), [(7, 1), (8, 0)])
def test_nibble_nine_at_scale_a_half_is_a_half(stored, first):
    """GPTQ v1 stores the zero minus 1, v2 as it is: 0.5·(9 − 8)."""
    qweight = words(np.full((8, 8), 9), 4, 0)
    qzeros = words(np.full((1, 8), stored), 4, 1)
    layer = unpack_gptq(qweight, qzeros, np.full((1, 8), 0.5, np.float32), None, bits=4, first=first)
    np.testing.assert_array_equal(dequantized(layer, 8), 0.5)


def test_one_is_added_to_each_zero_by_itself():
    """0xFFFFFFF7: a carry across nibbles would give 0x00000008; each nibble wraps to 0x11111108's digits
    minus the carry, that is 8 and seven zeros."""
    qzeros = np.array([[0xFFFFFFF7]], np.uint32).view(np.int32)
    layer = unpack_gptq(
        words(np.zeros((8, 8)), 4, 0), qzeros, np.ones((1, 8), np.float32), None, bits=4, first=1
    )
    np.testing.assert_array_equal(layer.zeros[:, 0], [8, 0, 0, 0, 0, 0, 0, 0])


def test_eight_bit_gptq():
    rng = np.random.default_rng(0)
    q = rng.integers(0, 256, (32, 8))
    layer = unpack_gptq(
        words(q, 8, 0), words(np.full((1, 8), 127), 8, 1), np.ones((1, 8), np.float32), None, bits=8, first=1
    )
    np.testing.assert_array_equal(dequantized(layer, 32), q.T - 128.0)


def test_activation_order_reads_scale_and_zero_of_each_input():
    """K 64, group 16, g_idx shuffled: W[k] = (q[k] − z[g_idx[k]])·s[g_idx[k]]."""
    rng = np.random.default_rng(1)
    q, z = rng.integers(0, 16, (64, 8)), rng.integers(0, 16, (4, 8))
    s, g_idx = (
        rng.uniform(0.1, 1, (4, 8)).astype(np.float32),
        rng.permutation(np.arange(64) // 16).astype(np.int32),
    )
    layer = unpack_gptq(words(q, 4, 0), words(z, 4, 1), s, g_idx, bits=4, first=0)
    expected = (q - z[g_idx].astype(float)) * s[g_idx]
    np.testing.assert_allclose(dequantized(layer, 16), expected.T)
    assert layer.order is not None


@pytest.mark.parametrize("g_idx", [None, np.arange(64, dtype=np.int32) // 16])
def test_groups_in_order_take_the_fast_path(g_idx):
    layer = unpack_gptq(
        words(np.zeros((64, 8)), 4, 0),
        words(np.zeros((4, 8)), 4, 1),
        np.ones((4, 8), np.float32),
        g_idx,
        bits=4,
        first=1,
    )
    assert layer.order is None


@pytest.mark.parametrize("g_idx", [np.zeros(64), np.full(64, 5), np.full(64, -1), np.arange(32) // 16])
def test_a_g_idx_that_does_not_fit_is_refused(g_idx):
    with pytest.raises(CheckpointError, match="g_idx gives"):
        unpack_gptq(
            words(np.zeros((64, 8)), 4, 0),
            words(np.zeros((4, 8)), 4, 1),
            np.ones((4, 8), np.float32),
            g_idx.astype(np.int32),
            bits=4,
            first=1,
        )


def test_awq_columns_zero_to_seven_are_one_known_word():
    word = np.array([[0x75316420]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(unpack_words(word, 4, 1)[0], [0, 2, 4, 6, 1, 3, 5, 7])
    layer = unpack_awq(np.repeat(word, 8, axis=0), word, np.ones((1, 8), np.float32))
    np.testing.assert_array_equal(layer.values[:, 0], np.arange(8))
    np.testing.assert_array_equal(layer.zeros[:, 0], np.arange(8))  # same order, no 1 added
    np.testing.assert_array_equal(dequantized(layer, 8), 0)


def test_rows_packed_along_the_inputs():
    rng = np.random.default_rng(2)
    q, z = rng.integers(0, 16, (16, 64)), rng.integers(0, 16, (16, 2))
    s = rng.uniform(0.1, 1, (16, 2)).astype(np.float32)
    layer = unpack_rows(words(q, 4, 1), words(z, 4, 0), s, None, columns=64, bits=4)
    np.testing.assert_allclose(
        dequantized(layer, 32), (q - np.repeat(z, 32, 1)) * np.repeat(s, 32, 1).astype(float)
    )
    symmetric = unpack_rows(words(q, 4, 1), None, s, np.full(64, -1, np.int32), columns=64, bits=4)
    np.testing.assert_array_equal(symmetric.zeros, 8)
    assert symmetric.order is None


def test_nibbles_are_packed_as_onnx_reads_them():
    values = np.random.default_rng(3).integers(0, 16, (4, 6)).astype(np.uint8)
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.UINT4, dims=[4, 6], raw_data=pack_nibbles(values))
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor).astype(np.uint8), values)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not read"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits a weight; 4 and 8 are read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv' is packed otherwise"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 kinds of weights"),
        ("gptq", "not an object"),
    ],
)
def test_what_is_not_read_is_named(table, words):
    with pytest.raises(UnsupportedModelError, match=words):
        read_scheme({"quantization_config": table})


# Whole models.

HIDDEN, INNER, HEADS, KV, DIM, VOCAB, GROUP = 64, 128, 4, 2, 16, 96, 32
LINEARS = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV * DIM, HIDDEN),
    "self_attn.v_proj": (KV * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def integers(rng, rows, columns, *, symmetric):
    q = rng.integers(0, 16, (rows, columns))
    z = np.full((rows, columns // GROUP), 8) if symmetric else rng.integers(3, 13, (rows, columns // GROUP))
    s = rng.uniform(0.01, 0.03, (rows, columns // GROUP)).astype(np.float16)
    return q, z, s


def weights(q, z, s, g_idx=None):
    groups = np.arange(q.shape[1]) // GROUP if g_idx is None else g_idx
    return (s.astype(np.float32)[:, groups] * (q - z[:, groups])).astype(np.float32)


def as_gptq(base, q, z, s, g_idx, first):
    tensors = {
        f"{base}.qweight": words(q.T, 4, 0),
        f"{base}.qzeros": words((z.T - first) % 16, 4, 1),
        f"{base}.scales": s.T.copy(),
    }
    groups = np.arange(q.shape[1]) // GROUP if g_idx is None else g_idx
    return tensors | {f"{base}.g_idx": groups.astype(np.int32)}


def as_awq(base, q, z, s):
    def shuffled(a):
        return words(a.reshape(len(a), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(a), -1), 4, 1)

    return {f"{base}.qweight": shuffled(q.T), f"{base}.qzeros": shuffled(z.T), f"{base}.scales": s.T.copy()}


def as_compressed(base, q, z, s, *, symmetric):
    tensors = {
        f"{base}.weight_packed": words(q, 4, 1),
        f"{base}.weight_scale": s,
        f"{base}.weight_shape": np.array(q.shape, np.int64),
    }
    return tensors if symmetric else tensors | {f"{base}.weight_zero_point": words(z, 4, 0)}


KINDS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "sym": False, "group_size": GROUP, "desc_act": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq_order": {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": True},
    "gptq_mislabelled": {"quant_method": "gptq", "bits": 4, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "version": "GEMM"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}},
    },
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "symmetric": True}}},
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8_rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
    },
}


def layer_tensors(kind, rng, base, rows, columns, orders):
    """Tensors of one quantised layer and the float32 weights that they mean."""
    if kind == "int8":
        q, s = rng.integers(-127, 128, (rows, columns)).astype(np.int8), rng.uniform(1e-3, 2e-3, (rows, 1))
        s = s.astype(bfloat16)
        return {f"{base}.weight": q, f"{base}.weight_scale": s}, q * s.astype(np.float32)
    if kind.startswith("fp8"):
        w = (rng.standard_normal((rows, columns)) * 50).astype(float8_e4m3fn)
        if kind == "fp8":
            s = rng.uniform(1e-3, 2e-3, (-(-rows // 32), columns // 32)).astype(np.float32)
            full = np.repeat(np.repeat(s, 32, 0), 32, 1)[:rows]
            return {f"{base}.weight": w, f"{base}.weight_scale_inv": s}, w.astype(np.float32) * full
        s = rng.uniform(1e-3, 2e-3, (rows, 1)).astype(np.float32)
        return {f"{base}.weight": w, f"{base}.weight_scale": s}, w.astype(np.float32) * s
    symmetric = kind in ("gptq_order", "gptq_mislabelled")
    q, z, s = integers(rng, rows, columns, symmetric=symmetric)
    if kind == "awq":
        return as_awq(base, q, z, s), weights(q, z, s)
    if kind == "compressed":
        return as_compressed(base, q, z, s, symmetric=False), weights(q, z, s)
    g_idx = None
    if kind == "gptq_order":  # layers that share an input share its order
        g_idx = orders.setdefault(
            (base.split(".")[2], columns, "o_proj" in base), rng.permutation(np.arange(columns) // GROUP)
        )
    first = 0 if kind in ("gptq_v2", "gptq_mislabelled") else 1
    return as_gptq(base, q, z, s, g_idx, first), weights(q, z, s, g_idx)


def checkpoint(folder: Path, kind: str, seed: int = 0, edit=None) -> tuple[Path, Path]:
    """The same tiny Llama twice: quantised, and as the float32 numbers it means."""
    rng = np.random.default_rng(seed)
    plain = {
        "model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "model.norm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
    }
    for layer in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"model.layers.{layer}.{norm}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    quantised, orders = dict(plain), {}
    for layer in range(2):
        for name, (rows, columns) in LINEARS.items():
            base = f"model.layers.{layer}.{name}"
            tensors, exact = layer_tensors(kind, rng, base, rows, columns, orders)
            quantised |= tensors
            plain[f"{base}.weight"] = exact.astype(np.float32)
    if edit is not None:
        edit(quantised)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    folders = folder / f"{kind}", folder / f"{kind}-plain"
    for place, tensors, extra in zip(
        folders, (quantised, plain), ({"quantization_config": KINDS[kind]}, {}), strict=True
    ):
        place.mkdir()
        save_file(tensors, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config | extra))
    return folders


def engine_logits(source: Path, out: Path, quant: str):
    from enginebay.builder.build import BuildConfig, build_engine
    from enginebay.export.stepping import Stepper, Stream
    from enginebay.triton_repo.runtime.ort_engine import EngineOptions, OrtEngine

    export_model(source, out / f"{source.name}.exported")
    folder = out / f"{source.name}.{quant}"
    report = build_engine(out / f"{source.name}.exported", folder, BuildConfig(quant=quant))
    tokens = np.random.default_rng(9).integers(0, VOCAB, 20).tolist()
    engine = OrtEngine(folder, EngineOptions(num_blocks=8))
    return Stepper(engine).step([(Stream(tokens), 20)])[0], report


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_is_the_numbers_it_means(tmp_path, kind):
    """Through the engine, whose int8 activations and 11-bit scales leave a small difference."""
    quantised, plain = checkpoint(tmp_path, kind)
    expected, _ = engine_logits(plain, tmp_path, "fp32")
    actual, report = engine_logits(quantised, tmp_path, "fp32")
    tolerance = 0.02 if kind.startswith("fp8") else 0.08
    assert np.abs(actual - expected).max() < tolerance * np.abs(expected).max()
    assert np.corrcoef(actual.ravel(), expected.ravel())[0, 1] > 0.999
    formats = {(layer.format.key, layer.method) for layer in report.layers if layer.layer != "lm_head"}
    assert formats == {
        "int8": {("i8", "as stored")},
        "fp8": {("f8.b32", "as stored")},
        "fp8_rows": {("f8", "as stored")},
        "gptq_order": {("i4.b32.sym", "as stored")},
        "gptq_mislabelled": {("i4.b32.sym", "as stored")},
    }.get(kind, {("i4.b32.asym", "as stored")})


def test_version_two_zeros_under_a_version_one_label_are_noticed(tmp_path):
    quantised, _ = checkpoint(tmp_path, "gptq_mislabelled")
    (note,) = export_model(quantised, tmp_path / "out").notes
    assert "holds the zeros of gptq_v2" in note
    proper, _ = checkpoint(tmp_path, "gptq_order")
    assert export_model(proper, tmp_path / "out2").notes == ()


def test_weights_are_the_stored_integers(tmp_path):
    """Nothing is rounded anew: the graph's DequantizeLinear gives the checkpoint's numbers."""
    from onnx.reference import ReferenceEvaluator

    quantised, plain = checkpoint(tmp_path, "gptq_order")
    export_model(quantised, tmp_path / "q")
    export_model(plain, tmp_path / "p")
    model = onnx.load(tmp_path / "q" / "model.onnx")
    name = next(
        n.output[0]
        for n in model.graph.node
        if n.op_type == "DequantizeLinear" and "0.mlp.down" in n.output[0]
    )
    node = next(n for n in model.graph.node if n.output[0] == name)
    held = [t for t in model.graph.initializer if t.name in node.input]
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [HIDDEN, INNER])],
        held,
    )
    (w,) = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=model.opset_import)).run(None, {})
    order = next(t for t in model.graph.initializer if t.name.endswith("0.mlp.down_proj.weight.order"))
    exact = next(
        t
        for t in onnx.load(tmp_path / "p" / "model.onnx").graph.initializer
        if t.name.endswith("0.mlp.down_proj.weight")
    )
    expected = onnx.numpy_helper.to_array(exact)[:, onnx.numpy_helper.to_array(order)]
    np.testing.assert_allclose(w, expected, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan, np.inf])
def test_a_scale_that_is_no_scale_is_named(tmp_path, value):
    def edit(tensors):
        tensors["model.layers.1.mlp.up_proj.scales"][1, 3] = value

    quantised, _ = checkpoint(tmp_path, "gptq", edit=edit)
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj.*has scale .*positive numbers"):
        export_model(quantised, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_layer_that_is_missing_is_named(tmp_path):
    quantised, _ = checkpoint(tmp_path, "awq", edit=lambda t: t.pop("model.layers.0.mlp.down_proj.qzeros"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.mlp\.down_proj\.qzeros"):
        export_model(quantised, tmp_path / "out")


def test_orders_that_differ_between_q_and_k_are_named(tmp_path):
    def edit(tensors):
        g_idx = tensors["model.layers.0.self_attn.k_proj.g_idx"]
        tensors["model.layers.0.self_attn.k_proj.g_idx"] = g_idx[::-1].copy()

    quantised, _ = checkpoint(tmp_path, "gptq_order", edit=edit)
    with pytest.raises(CheckpointError, match="such as q, k and v, have different groups or g_idx"):
        export_model(quantised, tmp_path / "out")


def test_nan_in_fp8_weights_is_named(tmp_path):
    def edit(tensors):
        bits = tensors["model.layers.0.mlp.up_proj.weight"].view(np.uint8).copy()
        bits[5, 5] = 0x7F
        tensors["model.layers.0.mlp.up_proj.weight"] = bits.view(float8_e4m3fn)

    quantised, _ = checkpoint(tmp_path, "fp8", edit=edit)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight' holds NaN at row"):
        export_model(quantised, tmp_path / "out")
