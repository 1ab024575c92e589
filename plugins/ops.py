"""The op table: the single truth of every EngineBay operator.

The exporter emits the canonical ops, the builder lowers to the others, the kernel libraries report the
versions they implement and `enginebay.plugins.load` refuses a library whose table differs from this one.

Shapes are symbolic: T tokens of a step (all sequences, one after another), B sequences, W width of the
block table, Hq and Hkv query and key/value heads, D head size, R rotary size, P positions in a RoPE table.
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "enginebay"
OPSET = 1

FLOATS = ("float32", "float16", "bfloat16")

# Elements of a paged cache. int8 and float8e4m3fn: value = scale * code, scales in PagedAttention's
# cache_scales. uint8: INT4 rows of int4_cache_row_bytes(D) bytes, which hold their own scales.
CACHE_DTYPES = (*FLOATS, "int8", "float8e4m3fn", "uint8")
INT4_CACHE_GROUP = 32  # values of an INT4 row that share a scale and a minimum


def int4_cache_row_bytes(head_dim: int) -> int:
    """Bytes of an INT4 cache row, one head's key or value of a token: codes, then fp16 scales and minimums.

    ValueError where head_dim is no positive multiple of INT4_CACHE_GROUP.
    """
    if head_dim <= 0 or head_dim % INT4_CACHE_GROUP:
        raise ValueError(
            f"head_dim {head_dim} is no positive multiple of {INT4_CACHE_GROUP}, which an INT4 cache takes; "
            "choose another cache dtype"
        )
    return head_dim // 2 + 4 * (head_dim // INT4_CACHE_GROUP)


@dataclass(frozen=True)
class Param:
    """One input or output: its name, the dtypes it may have and its symbolic shape."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """One attribute. `default` None means that the graph must state it."""

    name: str
    default: int | float | str | None
    doc: str


@dataclass(frozen=True)
class Op:
    """One operator of the `enginebay` domain.

    `canonical` ops appear in exported graphs; the others only in engines, put there by a lowering.
    `aliases` maps an output to the input whose buffer it must be (the op writes in place).
    """

    name: str
    version: int
    doc: str
    inputs: tuple[Param, ...]
    outputs: tuple[Param, ...]
    attributes: tuple[Attribute, ...] = ()
    canonical: bool = False
    aliases: tuple[tuple[str, str], ...] = ()

    def input_index(self, name: str) -> int:
        """Position of the input called `name`; KeyError where the op has none."""
        for index, param in enumerate(self.inputs):
            if param.name == name:
                return index
        raise KeyError(f"op {self.name} has no input '{name}'; it has {[p.name for p in self.inputs]}")


PAGED_ATTENTION = Op(
    name="PagedAttention",
    version=1,
    doc="Per-head q/k norm, RoPE, write of k and v into the paged cache, attention over the block table.",
    canonical=True,
    inputs=(
        Param("qkv", FLOATS, ("T", "(Hq+2*Hkv)*D")),
        Param("cache", CACHE_DTYPES, ("blocks", "2", "block_size", "Hkv", "D")),
        Param("query_start", ("int32",), ("B+1",)),
        Param("kv_len", ("int32",), ("B",)),
        Param("block_table", ("int32",), ("B", "W")),
        Param("slot_mapping", ("int32",), ("T",)),
        Param("position_ids", ("int32",), ("T",)),
        Param("rope_cos", ("float32",), ("P", "R/2"), optional=True),
        Param("rope_sin", ("float32",), ("P", "R/2"), optional=True),
        Param("q_norm", ("float32",), ("D",), optional=True),
        Param("k_norm", ("float32",), ("D",), optional=True),
        Param("sinks", ("float32",), ("Hq",), optional=True),
        # Of 8-bit caches: keys' then values', a scale a head ([2, Hkv]) or a channel; absent: 1.
        Param("cache_scales", ("float32",), ("2", "Hkv", "D"), optional=True),
        # Colder tiers, read only. Block ids count on through cache, then cache_int8, then cache_int4;
        # slots lie in cache, which is then float; cache_scales are cache_int8's.
        Param("cache_int8", ("int8",), ("blocks8", "2", "block_size", "Hkv", "D"), optional=True),
        Param("cache_int4", ("uint8",), ("blocks4", "2", "block_size", "Hkv", "row_bytes"), optional=True),
        # Of an INT4 cache that is written: what keys and values are near to, taken off where that helps.
        Param("cache_offsets", ("float32",), ("2", "Hkv", "D"), optional=True),
    ),
    outputs=(
        Param("attention", FLOATS, ("T", "Hq*D")),
        Param("cache_out", CACHE_DTYPES, ("blocks", "2", "block_size", "Hkv", "D")),
    ),
    attributes=(
        Attribute("num_heads", None, "Hq"),
        Attribute("num_kv_heads", None, "Hkv; divides Hq"),
        Attribute("head_dim", None, "D"),
        Attribute("scale", None, "factor on q.k before the soft cap"),
        Attribute("causal", 1, "0: every token of a sequence sees the whole of it"),
        Attribute("window", 0, "a token sees itself and the window-1 before it; 0: no window"),
        Attribute("softcap", 0.0, "c*tanh(score/c); 0: none"),
        Attribute("rope_interleaved", 0, "1: pairs (2i, 2i+1); 0: pairs (i, i+R/2)"),
        Attribute("norm_epsilon", 1e-6, "of q_norm and k_norm"),
        Attribute("latent_dim", 0, "C; 0: none; else multi-head latent attention, LATENT_SHAPES"),
    ),
    aliases=(("cache_out", "cache"),),
)

# Shapes of PagedAttention with latent_dim C: Hkv is 1 and D is C+R. All heads attend to one cached vector a
# token; RoPE turns the last R elements of queries and of that vector, and its first C are the value
# (DeepSeek-V2).
LATENT_SHAPES = {
    "qkv": ("T", "(Hq+1)*D"),
    "cache": ("blocks", "block_size", "D"),
    "attention": ("T", "Hq*C"),
    "cache_out": ("blocks", "block_size", "D"),
    "cache_scales": ("1", "1", "D"),  # or [1, 1]
}

CACHE_CONVERT = Op(
    name="CacheConvert",
    version=1,
    doc="Copies blocks into a narrower pool, between steps (plugins/load_cache.py); no node of a graph.",
    inputs=(
        Param(
            "source", ("float32", "float16", "bfloat16", "int8"), ("blocks", "2", "block_size", "Hkv", "D")
        ),
        Param("destination", ("int8", "uint8"), ("blocks2", "2", "block_size", "Hkv", "row")),
        Param("pairs", ("int32",), ("N", "2")),  # block of source, block of destination
        # [2, Hkv, D] of the int8 pool, whichever of the two it is.
        Param("cache_scales", ("float32",), ("2", "Hkv", "D"), optional=True),
    ),
    outputs=(Param("destination_out", ("int8", "uint8"), ("blocks2", "2", "block_size", "Hkv", "row")),),
    aliases=(("destination_out", "destination"),),
)

# Weight layouts of QuantLinear and Embedding: how N x K weights are stored, not which device packs them.
WEIGHT_FORMATS = ("f32", "f16", "bf16", "f8", "i8", "i4")

_LAYOUT = Attribute(
    "layout", "", "name of the packed layout; a library whose own is another refuses it. Empty: not checked"
)

_PACKED = (
    Attribute("in_features", None, "K"),
    Attribute("out_features", None, "N"),
    Attribute("format", None, f"one of {', '.join(WEIGHT_FORMATS)}"),
    Attribute("block_size", 0, "weights along K that share a scale; 0 for f32, f16, bf16"),
    Attribute("symmetric", 1, "0: each block has a minimum beside its scale, w = scale*q + minimum"),
    _LAYOUT,
)

QUANT_LINEAR = Op(
    name="QuantLinear",
    version=1,
    doc="y = x.W^T + bias over packed weights. A row of y depends on its row of x alone, bit for bit.",
    inputs=(
        Param("x", FLOATS, ("T", "K")),
        Param("weight", ("uint8",), ("bytes",)),
        Param("bias", ("float32",), ("N",), optional=True),
    ),
    outputs=(Param("y", FLOATS, ("T", "N")),),
    attributes=_PACKED,
)

# An op of its own: a library that does not round must refuse it by name, not leave an attribute unread.
QUANT_LINEAR_F8_INPUTS = Op(
    name="QuantLinearF8Inputs",
    version=2,
    doc="QuantLinear over rows of x rounded to E4M3 (include/enginebay/quant_linear_f8_inputs.h). What that "
    "left of the `repeated` inputs follows the row, and columns of W for them the others: K counts both.",
    inputs=(
        Param("x", FLOATS, ("T", "K-R")),
        *QUANT_LINEAR.inputs[1:],
        Param("repeated", ("int32",), ("R",), optional=True),
    ),
    outputs=QUANT_LINEAR.outputs,
    attributes=(
        *_PACKED,
        Attribute(
            "input_scale", 0.0, "x = input_scale*q for all rows, q at most 448; 0: amax/448 of each row"
        ),
    ),
)

EMBEDDING = Op(
    name="Embedding",
    version=1,
    doc="Rows of the weights QuantLinear reads, so that tied embeddings are stored once. Row = token id.",
    inputs=(Param("input_ids", ("int32",), ("T",)), Param("weight", ("uint8",), ("bytes",))),
    outputs=(Param("y", FLOATS, ("T", "K")),),
    attributes=_PACKED,
)

ADD_RMS_NORM = Op(
    name="AddRMSNorm",
    version=1,
    doc="sum = x + residual; y = sum / rms(sum) * weight, in fp32.",
    inputs=(
        Param("x", FLOATS, ("T", "H")),
        Param("residual", FLOATS, ("T", "H")),
        Param("weight", ("float32",), ("H",)),
    ),
    outputs=(Param("y", FLOATS, ("T", "H")), Param("sum", FLOATS, ("T", "H"))),
    attributes=(Attribute("epsilon", 1e-6, "added to the mean of squares"),),
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")

GATED_ACTIVATION = Op(
    name="GatedActivation",
    version=1,
    doc="activation(gate) * up, where gate is the first half of the row and up the second.",
    inputs=(Param("gate_up", FLOATS, ("T", "2*I")),),
    outputs=(Param("y", FLOATS, ("T", "I")),),
    attributes=(Attribute("activation", None, f"one of {', '.join(ACTIVATIONS)}"),),
)

# The products of LayerTail, in the order of its weights.
TAIL_PRODUCTS = ("out", "gate_up", "down", "next")

LAYER_TAIL = Op(
    name="LayerTail",
    version=1,
    doc="A layer after attention and the next layer's first product (include/enginebay/layer_tail.h).",
    inputs=(
        Param("x", FLOATS, ("T", "A")),
        Param("residual", FLOATS, ("T", "H")),
        Param("mlp_norm", ("float32",), ("H",)),
        Param("next_norm", ("float32",), ("H",)),
        *(Param(f"{name}_weight", ("uint8",), ("bytes",)) for name in TAIL_PRODUCTS),
        *(
            Param(f"{name}_bias", ("float32",), (width,), optional=True)
            for name, width in zip(TAIL_PRODUCTS, ("H", "2*I", "H", "N"), strict=True)
        ),
    ),
    outputs=(Param("y", FLOATS, ("T", "N")), Param("sum", FLOATS, ("T", "H"))),
    attributes=(
        Attribute("attended", None, "A"),
        Attribute("hidden", None, "H"),
        Attribute("intermediate", None, "I"),
        Attribute("next_features", None, "N"),
        *(
            Attribute(f"{name}_{attribute.name}", attribute.default, attribute.doc)
            for name in TAIL_PRODUCTS
            for attribute in _PACKED[2:]
        ),
        Attribute("activation", None, f"one of {', '.join(ACTIVATIONS)}"),
        Attribute("mlp_epsilon", 1e-6, "of the norm before the MLP"),
        Attribute("next_epsilon", 1e-6, "of the norm before the next product"),
    ),
)

MOE_SCORINGS = ("softmax", "sigmoid", "softmax_topk")

_ROUTING = (
    Attribute("num_experts", None, "E"),
    Attribute("top_k", None, "experts a token goes to"),
    Attribute("hidden", None, "H"),
    Attribute("intermediate", None, "I"),
    Attribute("scoring", "softmax", f"one of {', '.join(MOE_SCORINGS)}; the last is softmax over the chosen"),
    Attribute("renormalize", 0, "1: the chosen scores are divided by their sum"),
    Attribute("num_groups", 0, "groups of experts for group-limited routing; 0: none"),
    Attribute("top_groups", 0, "groups a token may use"),
    Attribute("routed_scale", 1.0, "factor on the weights after renormalisation"),
    Attribute("activation", None, f"one of {', '.join(ACTIVATIONS)}"),
    Attribute(
        "clamp", 0.0, "c > 0: gate is at most c, up within -c..c, and (up + 1)*gate*sigmoid(alpha*gate)"
    ),
    Attribute("clamp_alpha", 1.702, "alpha of a clamped gate"),
)


def _moe_inputs(*weights: Param) -> tuple[Param, ...]:
    return (
        Param("x", FLOATS, ("T", "H")),
        Param("router_logits", ("float32",), ("T", "E")),
        *weights,
        Param("correction_bias", ("float32",), ("E",), optional=True),
        Param("gate_up_bias", ("float32",), ("E", "2*I"), optional=True),
        Param("down_bias", ("float32",), ("E", "H"), optional=True),
    )


MOE = Op(
    name="MoE",
    version=1,
    doc="Top-k routing and the chosen experts' gated MLPs (include/enginebay/moe.h); no shared experts.",
    canonical=True,
    inputs=_moe_inputs(
        Param("gate_up", FLOATS, ("E", "2*I", "H")),
        Param("down", FLOATS, ("E", "H", "I")),
    ),
    outputs=(Param("y", FLOATS, ("T", "H")),),
    attributes=_ROUTING,
)

EXPERT_ALIGNMENT = 256  # bytes; every expert's packed weights begin at a multiple of it

QUANT_MOE = Op(
    name="QuantMoE",
    version=1,
    doc="MoE over packed weights: one expert after another, each as QuantLinear's, at eb_moe_expert_stride.",
    inputs=_moe_inputs(
        Param("gate_up", ("uint8",), ("bytes",)),
        Param("down", ("uint8",), ("bytes",)),
    ),
    outputs=(Param("y", FLOATS, ("T", "H")),),
    attributes=(
        *_ROUTING,
        Attribute("format", None, f"one of {', '.join(WEIGHT_FORMATS)}"),
        Attribute(
            "block_size", 0, "weights along K that share a scale; 0: the float formats, or a whole row"
        ),
        Attribute("symmetric", 1, "0: each block has a minimum beside its scale, w = scale*q + minimum"),
        _LAYOUT,
    ),
)

_SAMPLING = (
    Param("temperature", ("float32",), ("B",), optional=True),
    Param("top_k", ("int32",), ("B",), optional=True),
    Param("top_p", ("float32",), ("B",), optional=True),
    Param("min_p", ("float32",), ("B",), optional=True),
    Param("seeds", ("int64",), ("B",), optional=True),
    Param("positions", ("int64",), ("B",), optional=True),
)

# Penalties are in the C ABI only: they edit logits in place, which no graph may do to an input.
SPEC_VERIFY = Op(
    name="SpecVerify",
    version=1,
    doc="Accepts drafts, chains or trees, keeping the target's distribution (enginebay/spec_verify.h).",
    inputs=(
        Param("logits", FLOATS, ("R", "V")),
        Param("row_start", ("int32",), ("B+1",)),
        Param("draft_tokens", ("int32",), ("R",)),
        Param("parents", ("int32",), ("R",), optional=True),
        Param("draft_probs", ("float32",), ("R", "V"), optional=True),
        *_SAMPLING,
    ),
    outputs=(
        Param("accepted", ("int32",), ("B",)),
        Param("path", ("int32",), ("B", "max_depth")),
        Param("next_token", ("int32",), ("B",)),
    ),
    attributes=(Attribute("max_depth", None, "the longest path of drafts a sequence may accept"),),
)

SAMPLE = Op(
    name="Sample",
    version=1,
    doc="SpecVerify without drafts: a token a row.",
    inputs=(Param("logits", FLOATS, ("B", "V")), *_SAMPLING),
    outputs=(Param("next_token", ("int32",), ("B",)),),
)

# Canonical ops that no library runs as they are.
EXPORTED: tuple[Op, ...] = (MOE,)

OPS: tuple[Op, ...] = (
    PAGED_ATTENTION,
    QUANT_LINEAR,
    QUANT_LINEAR_F8_INPUTS,
    EMBEDDING,
    ADD_RMS_NORM,
    GATED_ACTIVATION,
    LAYER_TAIL,
    QUANT_MOE,
    SPEC_VERIFY,
    SAMPLE,
    CACHE_CONVERT,
)


def op(name: str) -> Op:
    """The op called `name`; KeyError naming what exists otherwise."""
    for candidate in (*OPS, *EXPORTED):
        if candidate.name == name:
            return candidate
    raise KeyError(f"no EngineBay op '{name}'; the table holds {[o.name for o in OPS]}")
