"""The CUDA library over torch tensors: one method an op, outputs and workspaces poisoned before each call."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
PACKAGED = Path(__file__).resolve().parents[2] / "plugins" / "lib" / "libenginebay_cuda.so"
DTYPES = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float8_e4m3fn: 4,
    torch.int8: 5,
}
FORMATS = {"f16": 2, "bf16": 3, "f8": 4, "i8": 5, "i4": 6}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
SCORINGS = ("softmax", "sigmoid", "softmax_topk")


def library_path() -> Path:
    """`ENGINEBAY_CUDA_LIBRARY`, else where the build puts it."""
    return Path(os.environ.get("ENGINEBAY_CUDA_LIBRARY") or PACKAGED)


class LibraryError(RuntimeError):
    """The library refused a call. `status` is the code, the message the library's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _struct(name: str, *groups: tuple[Any, str]) -> type[ctypes.Structure]:
    fields = [(field, kind) for kind, names in groups for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Context = _struct(
    "Context",
    (c_uint32, "abi_version threads"),
    (c_void_p, "stream parallel_for pool message"),
    (c_size_t, "message_bytes"),
)
LinearDesc = _struct("LinearDesc", (c_int32, "in_features out_features format block_size symmetric io_dtype"))
LinearWeights = _struct("LinearWeights", (c_void_p, "values scales minimums"))
AttentionDesc = _struct(
    "AttentionDesc",
    (c_int32, "num_heads num_kv_heads head_dim block_size num_blocks table_width rotary_dim rope_positions"),
    (c_int32, "rope_interleaved causal window"),
    (c_float, "scale softcap norm_epsilon"),
    (c_int32, "io_dtype cache_dtype latent_dim cache_scale_dim num_blocks_int8 num_blocks_int4"),
)
AttentionArgs = _struct(
    "AttentionArgs",
    (c_int64, "tokens sequences"),
    (c_void_p, "qkv cache query_start kv_len block_table slot_mapping position_ids rope_cos rope_sin"),
    (c_void_p, "q_norm k_norm sinks attention cache_scales tree_mask"),
    (c_int32, "tree_words"),
    (c_void_p, "cache_int8 cache_int4 cache_offsets"),
)
SpecDesc = _struct("SpecDesc", (c_int32, "vocab max_depth dtype"))
SpecArgs = _struct(
    "SpecArgs",
    (c_int64, "sequences rows"),
    (
        c_void_p,
        "logits row_start draft_tokens parents draft_probs temperature top_k top_p min_p seeds positions",
    ),
    (c_void_p, "penalty_start penalty_tokens penalty_counts repetition presence frequency"),
    (c_void_p, "accepted path next_token"),
)
MoeDesc = _struct(
    "MoeDesc",
    (c_int32, "num_experts top_k hidden intermediate scoring renormalize num_groups top_groups"),
    (c_float, "routed_scale"),
    (c_int32, "activation format block_size symmetric io_dtype"),
    (c_float, "clamp clamp_alpha"),
)
MoeArgs = _struct(
    "MoeArgs",
    (c_int64, "tokens"),
    (c_void_p, "x router_logits correction_bias gate_up down gate_up_bias down_bias y"),
)
NormDesc = _struct("NormDesc", (c_int32, "width"), (c_float, "epsilon"), (c_int32, "io_dtype"))
GateDesc = _struct("GateDesc", (c_int32, "width activation io_dtype"))


def pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cuda") -> Tensor:
    """A tensor of NaN (0xFF bytes): what a kernel forgets to write shows."""
    count = 1
    for size in shape:
        count *= size
    raw = torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return raw.view(dtype).view(shape)


class CudaLibrary:
    """The library at `library_path()`."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or library_path()
        self._library = ctypes.CDLL(str(self.path))
        self._library.eb_op_table.restype = ctypes.c_char_p
        self._library.eb_quant_linear_layout.restype = ctypes.c_char_p

    def op_table(self) -> str:
        return str(self._library.eb_op_table().decode())

    def call(self, name: str, *arguments: Any, stream: int | None = None, abi_version: int = 1) -> None:
        message = ctypes.create_string_buffer(512)
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
        context = Context(abi_version, 0, stream, None, None, ctypes.addressof(message), 512)
        status = getattr(self._library, name)(byref(context), *arguments)
        if status:
            raise LibraryError(status, message.value.decode(errors="replace") or f"{name}: status {status}")

    # QuantLinear

    @staticmethod
    def linear_desc(
        k: int, n: int, format: str, io: torch.dtype, block: int = 0, symmetric: bool = True
    ) -> Any:
        return LinearDesc(k, n, FORMATS[format], block, int(symmetric), DTYPES[io])

    def layout(self, desc: Any) -> str:
        return str(self._library.eb_quant_linear_layout(byref(desc)).decode())

    def packed_bytes(self, desc: Any) -> int:
        size = c_size_t()
        self.call("eb_quant_linear_packed_bytes", byref(desc), byref(size))
        return size.value

    def pack(
        self, desc: Any, values: Tensor, scales: Tensor | None = None, minimums: Tensor | None = None
    ) -> Tensor:
        """Host tensors to the packed layout, uint8 on the host."""
        packed = poisoned((self.packed_bytes(desc),), torch.uint8, "cpu")
        weights = LinearWeights(pointer(values), pointer(scales), pointer(minimums))
        self.call(
            "eb_quant_linear_pack",
            byref(desc),
            byref(weights),
            c_void_p(pointer(packed)),
            c_size_t(len(packed)),
        )
        return packed

    def unpack(self, desc: Any, packed: Tensor) -> Tensor:
        weights = poisoned((desc.out_features, desc.in_features), torch.float32, "cpu")
        self.call(
            "eb_quant_linear_unpack",
            *(byref(desc), c_void_p(pointer(packed)), c_size_t(len(packed)), c_void_p(pointer(weights))),
        )
        return weights

    def linear_workspace(self, desc: Any, rows: int) -> Tensor:
        size = c_size_t()
        self.call("eb_quant_linear_workspace_size", byref(desc), c_int64(rows), byref(size))
        return poisoned((size.value,), torch.uint8)

    def linear(
        self,
        desc: Any,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None = None,
        y: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        rows = x.shape[0]
        if y is None:
            y = poisoned((rows, desc.out_features), x.dtype)
        if workspace is None:
            workspace = self.linear_workspace(desc, rows)
        self.call(
            "eb_quant_linear_run",
            *(byref(desc), c_int64(rows), c_void_p(pointer(x)), c_void_p(pointer(packed))),
            *(c_size_t(len(packed)), c_void_p(pointer(bias)), c_void_p(pointer(y))),
            *(c_void_p(pointer(workspace)), c_size_t(len(workspace))),
        )
        return y

    def embedding(self, desc: Any, ids: Tensor, packed: Tensor, io: torch.dtype) -> Tensor:
        y = poisoned((len(ids), desc.in_features), io)
        self.call(
            "eb_embedding_run",
            *(byref(desc), c_int64(len(ids)), c_void_p(pointer(ids)), c_void_p(pointer(packed))),
            *(c_size_t(len(packed)), c_void_p(pointer(y))),
        )
        return y

    # PagedAttention

    def attention_workspace(self, desc: Any, tokens: int, sequences: int) -> Tensor:
        ints, size = c_size_t(), c_size_t()
        self.call(
            "eb_paged_attention_plan_size",
            *(byref(desc), c_int64(tokens), c_int64(sequences), byref(ints), byref(size)),
        )
        assert ints.value == 0
        return poisoned((size.value,), torch.uint8)

    def attention(
        self,
        desc: Any,
        inputs: dict[str, Tensor | None],
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """`inputs` are named as the fields of eb_paged_attention_args; the cache is written in place."""
        qkv, table = inputs["qkv"], inputs["block_table"]
        assert qkv is not None
        assert table is not None
        tokens, sequences = qkv.shape[0], table.shape[0]
        if out is None:
            out = poisoned((tokens, desc.num_heads * desc.head_dim), qkv.dtype)
        if workspace is None:
            workspace = self.attention_workspace(desc, tokens, sequences)
        tree = inputs.get("tree_mask")
        args = AttentionArgs(tokens=tokens, sequences=sequences, attention=pointer(out))
        for name, tensor in inputs.items():
            setattr(args, name, pointer(tensor))
        args.tree_words = 0 if tree is None else tree.shape[1]
        self.call(
            "eb_paged_attention_run",
            *(
                byref(desc),
                byref(args),
                None,
                c_size_t(0),
                c_void_p(pointer(workspace)),
                c_size_t(len(workspace)),
            ),
        )
        return out

    # SpecVerify

    def spec_workspace(self, desc: Any, sequences: int, rows: int) -> Tensor:
        size = c_size_t()
        self.call(
            "eb_spec_verify_workspace_size", byref(desc), c_int64(sequences), c_int64(rows), byref(size)
        )
        return poisoned((size.value,), torch.uint8)

    def spec_verify(
        self,
        logits: Tensor,
        sequences: int,
        max_depth: int = 0,
        workspace: Tensor | None = None,
        outputs: tuple[Tensor, Tensor, Tensor] | None = None,
        **inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(accepted [B], path [B, D], next_token [B])."""
        rows, vocab = logits.shape
        desc = SpecDesc(vocab, max_depth, DTYPES[logits.dtype])
        if workspace is None:
            workspace = self.spec_workspace(desc, sequences, rows)
        if outputs is None:
            shapes = ((sequences,), (sequences, max_depth), (sequences,))
            outputs = tuple(torch.full(s, -77, dtype=torch.int32, device="cuda") for s in shapes)
        assert outputs is not None
        args = SpecArgs(
            *(sequences, rows, pointer(logits)),
            accepted=pointer(outputs[0]),
            path=pointer(outputs[1]) or None,
            next_token=pointer(outputs[2]),
        )
        for name, tensor in inputs.items():
            setattr(args, name, pointer(tensor))
        self.call(
            "eb_spec_verify_run",
            *(byref(desc), byref(args), c_void_p(pointer(workspace)), c_size_t(len(workspace))),
        )
        return outputs

    # QuantMoE

    def expert_strides(self, desc: Any) -> tuple[int, int]:
        up, down = c_size_t(), c_size_t()
        self.call("eb_moe_expert_stride", byref(desc), byref(up), byref(down))
        return up.value, down.value

    def moe_workspace(self, desc: Any, tokens: int) -> Tensor:
        size = c_size_t()
        self.call("eb_moe_workspace_size", byref(desc), c_int64(tokens), byref(size))
        return poisoned((size.value,), torch.uint8)

    def moe(
        self,
        desc: Any,
        x: Tensor,
        y: Tensor | None = None,
        workspace: Tensor | None = None,
        **inputs: Tensor | None,
    ) -> Tensor:
        """`inputs` are named as the fields of eb_moe_args."""
        tokens = x.shape[0]
        if y is None:
            y = poisoned(tuple(x.shape), x.dtype)
        if workspace is None:
            workspace = self.moe_workspace(desc, tokens)
        args = MoeArgs(tokens=tokens, x=pointer(x), y=pointer(y))
        for name, tensor in inputs.items():
            setattr(args, name, pointer(tensor))
        self.call(
            "eb_moe_run", byref(desc), byref(args), c_void_p(pointer(workspace)), c_size_t(len(workspace))
        )
        return y

    # Elementwise

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        y, total = poisoned(tuple(x.shape), x.dtype), poisoned(tuple(x.shape), x.dtype)
        desc = NormDesc(x.shape[1], epsilon, DTYPES[x.dtype])
        self.call(
            "eb_add_rms_norm_run",
            *(byref(desc), c_int64(x.shape[0]), c_void_p(pointer(x)), c_void_p(pointer(residual))),
            *(c_void_p(pointer(weight)), c_void_p(pointer(y)), c_void_p(pointer(total))),
        )
        return y, total

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        width = gate_up.shape[1] // 2
        y = poisoned((gate_up.shape[0], width), gate_up.dtype)
        desc = GateDesc(width, ACTIVATIONS.index(activation), DTYPES[gate_up.dtype])
        self.call(
            "eb_gated_activation_run",
            *(byref(desc), c_int64(gate_up.shape[0]), c_void_p(pointer(gate_up)), c_void_p(pointer(y))),
        )
        return y
