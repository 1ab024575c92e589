"""The CPU kernel library from Python: where it is, whether it fits, and its ops over numpy arrays.

Serving needs `library_path` (for ONNX Runtime) and `library_hash` (for the manifest), the builder the
packing; the `run_*` methods are for tests and benchmarks. Light to import: numpy and ctypes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginebay.plugins import ops

ENVIRONMENT = "ENGINEBAY_PLUGIN_LIBRARY"
CUDA_ENVIRONMENT = "ENGINEBAY_CUDA_LIBRARY"
PACKAGED = Path(__file__).absolute().parent / "lib" / "libenginebay_cpu.so"
ABI_VERSION = 1
MESSAGE_BYTES = 512

STATUS_NAMES = {1: "invalid argument", 2: "unsupported", 3: "device error", 4: "internal error"}
DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
CACHE_DTYPES = {**DTYPES, "float8_e4m3fn": 4, "int8": 5, "uint8": 6}
WEIGHT_FORMATS = {"f32": 1, "f16": 2, "bf16": 3, "f8": 4, "i8": 5, "i4": 6}
ACTIVATIONS = {name: index for index, name in enumerate(ops.ACTIVATIONS)}

Array = NDArray[Any]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class PluginError(RuntimeError):
    """The library is missing, is another version's, or refused a call; the message says which and why."""


def library_path() -> Path:
    """The CPU library: `ENGINEBAY_PLUGIN_LIBRARY`, else the one beside this module. PluginError if absent."""
    wish = os.environ.get(ENVIRONMENT)
    path = Path(wish) if wish else PACKAGED
    if not path.is_file():
        where = f"{ENVIRONMENT}={wish}" if wish else str(path)
        raise PluginError(f"no plugin library at {where}; compile it with `make plugins`")
    return path


def cuda_kernels_path() -> Path:
    """The CUDA kernels, `ENGINEBAY_CUDA_LIBRARY` or beside the CPU library; the file need not be there."""
    return Path(os.environ.get(CUDA_ENVIRONMENT) or PACKAGED.with_name("libenginebay_cuda.so"))


def cuda_adapter_path() -> Path:
    """What ONNX Runtime registers for its CUDA provider; lies beside the kernels. PluginError if absent."""
    path = cuda_kernels_path().with_name("libenginebay_ort_cuda.so")
    for file in (path, cuda_kernels_path()):
        if not file.is_file():
            raise PluginError(f"no CUDA plugin library at {file}; compile it with `make plugins-cuda`")
    return path


def library_hash(path: Path | None = None) -> str:
    """SHA-256 of the library's file, as manifests record it."""
    with (path or library_path()).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Context(ctypes.Structure):
    _fields_ = (
        ("abi_version", c_uint32),
        ("threads", c_uint32),
        ("stream", c_void_p),
        ("parallel_for", c_void_p),
        ("pool", c_void_p),
        ("message", c_void_p),
        ("message_bytes", c_size_t),
    )


class _AttentionDesc(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int32) for name in ("block_size", "num_blocks", "table_width")),
        *((name, c_int32) for name in ("rotary_dim", "rope_positions")),
        *((name, c_int32) for name in ("rope_interleaved", "causal", "window")),
        *((name, c_float) for name in ("scale", "softcap", "norm_epsilon")),
        *((name, c_int32) for name in ("io_dtype", "cache_dtype", "latent_dim", "cache_scale_dim")),
        *((name, c_int32) for name in ("num_blocks_int8", "num_blocks_int4")),
    )


_ATTENTION_POINTERS = (
    *("qkv", "cache", "query_start", "kv_len", "block_table", "slot_mapping", "position_ids"),
    *("rope_cos", "rope_sin", "q_norm", "k_norm", "sinks", "attention", "cache_scales"),
)


_ATTENTION_TIERS = ("cache_int8", "cache_int4")


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("sequences", c_int64),
        *((name, c_void_p) for name in _ATTENTION_POINTERS),
        ("tree_mask", c_void_p),
        ("tree_words", c_int32),
        *((name, c_void_p) for name in (*_ATTENTION_TIERS, "cache_offsets")),
    )


class _LinearDesc(ctypes.Structure):
    _fields_ = tuple(
        (name, c_int32)
        for name in ("in_features", "out_features", "format", "block_size", "symmetric", "io_dtype")
    )


class _LinearWeights(ctypes.Structure):
    _fields_ = (("values", c_void_p), ("scales", c_void_p), ("minimums", c_void_p))


class _NormDesc(ctypes.Structure):
    _fields_ = (("width", c_int32), ("epsilon", c_float), ("io_dtype", c_int32))


class _ActivationDesc(ctypes.Structure):
    _fields_ = (("width", c_int32), ("activation", c_int32), ("io_dtype", c_int32))


_TASK = ctypes.CFUNCTYPE(None, c_void_p, c_size_t)
_PARALLEL_FOR = ctypes.CFUNCTYPE(None, c_void_p, c_size_t, _TASK, c_void_p)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "eb_paged_attention_plan_size": (c_int64, c_int64, POINTER(c_size_t), POINTER(c_size_t)),
    "eb_paged_attention_plan": (c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_size_t),
    "eb_paged_attention_run": (c_void_p, c_void_p, c_size_t, c_void_p, c_size_t),
    "eb_quant_linear_packed_bytes": (POINTER(c_size_t),),
    "eb_quant_linear_pack": (c_void_p, c_void_p, c_size_t),
    "eb_quant_linear_unpack": (c_void_p, c_size_t, c_void_p),
    "eb_quant_linear_workspace_size": (c_int64, POINTER(c_size_t)),
    "eb_quant_linear_run": (c_int64, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_size_t),
    "eb_quant_linear_kernels": (POINTER(c_char_p),),
    "eb_embedding_run": (c_int64, c_void_p, c_void_p, c_size_t, c_void_p),
    "eb_add_rms_norm_run": (c_int64, *[c_void_p] * 5),
    "eb_gated_activation_run": (c_int64, c_void_p, c_void_p),
}


class KernelLibrary:
    """The library at `path` (default: `library_path()`), after a check that its ops are those of `ops.py` and
    that it runs at the level ENGINEBAY_ISA asks for, if any.

    Calls raise PluginError with the library's own words. Arrays are float32 unless stated; outputs and
    workspaces start as NaN, so that what a kernel forgets to write shows.
    """

    def __init__(self, path: Path | None = None, threads: int = 1) -> None:
        self.path = path or library_path()
        self.threads = threads
        try:
            self._library = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise PluginError(f"{self.path} cannot be loaded: {error}") from error
        self._library.eb_op_table.restype = c_char_p
        self.ops = read_op_table(self.path, self._library.eb_op_table().decode())
        self.declare(_SIGNATURES)
        self._library.eb_quant_linear_layout.restype = c_char_p
        self._parallel_for = _PARALLEL_FOR(self._run_on_threads)
        one = np.ones(
            (1, 1), np.float32
        )  # every kernel refuses a wrong ENGINEBAY_ISA: the smallest does it now
        self.run_add_rms_norm(one, one, one[0], 0.0)

    def declare(self, signatures: Mapping[str, tuple[Any, ...]]) -> None:
        """Argument types of entry points, after the context and the descriptor that all of them take."""
        for name, arguments in signatures.items():
            getattr(self._library, name).argtypes = (c_void_p, c_void_p, *arguments)

    def require(self, names: Iterable[str]) -> None:
        """PluginError naming the ops among `names` that this library has no kernel for."""
        if missing := sorted(set(names) - self.ops.keys()):
            raise PluginError(
                f"{self.path} has no kernel for {', '.join(missing)}; it has {', '.join(self.ops)}"
            )

    def pack_linear(
        self,
        values: Array,
        scales: Floats | None = None,
        minimums: Floats | None = None,
        *,
        format: str,
        block_size: int = 0,
        symmetric: bool = True,
    ) -> Bytes:
        """Plain weights to this library's layout, uint8 [bytes].

        values [N, K]: float32, float16 or bfloat16 for f32, f16, bf16, int8 for i8, uint8 for i4
        (0..15) and f8 (the bits of E4M3).
        scales and minimums float32 [N, K/block_size]; minimums exactly where not symmetric.
        """
        rows, columns = values.shape
        expected = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8"}
        _expect("values", values, expected.get(_known_format(format), "uint8"), (rows, columns))
        quantised = format in ("f8", "i8", "i4")
        for name, array, needed in (
            ("scales", scales, quantised),
            ("minimums", minimums, quantised and not symmetric),
        ):
            if (array is not None) != needed:
                state = "missing" if needed else "given"
                raise PluginError(f"pack_linear: {name} {state} for format {format}, symmetric {symmetric}")
            if array is not None:
                _expect(name, array, "float32", (rows, -(-columns // max(block_size, 1))))
        desc = self._linear(columns, rows, format, block_size, symmetric)
        size = c_size_t()
        self.call("eb_quant_linear_packed_bytes", byref(desc), byref(size))
        packed = np.zeros(size.value, np.uint8)
        weights = _LinearWeights(_pointer(values), _pointer(scales), _pointer(minimums))
        self.call("eb_quant_linear_pack", byref(desc), byref(weights), _pointer(packed), packed.nbytes)
        return packed

    def unpack_linear(
        self,
        packed: Bytes,
        *,
        rows: int,
        columns: int,
        format: str,
        block_size: int = 0,
        symmetric: bool = True,
    ) -> Floats:
        """What the kernel multiplies by: float32 [N, K] = [rows, columns] out of packed weights."""
        desc = self._linear(columns, rows, format, block_size, symmetric)
        weights = np.full((rows, columns), np.nan, np.float32)
        self.call("eb_quant_linear_unpack", byref(desc), _pointer(packed), packed.nbytes, _pointer(weights))
        return weights

    def linear_bytes(self, *, rows: int, columns: int, format: str, block_size: int, symmetric: bool) -> int:
        """Bytes of the packed weights of a layer; PluginError where the library cannot pack it."""
        desc = self._linear(columns, rows, format, block_size, symmetric)
        size = c_size_t()
        self.call("eb_quant_linear_packed_bytes", byref(desc), byref(size))
        return size.value

    def linear_layout(self, *, rows: int, columns: int, format: str, block_size: int, symmetric: bool) -> str:
        """Name and version of the packed layout, for the manifest."""
        desc = self._linear(columns, rows, format, block_size, symmetric)
        return str(self._library.eb_quant_linear_layout(byref(desc)).decode())

    def linear_kernels(self, *, format: str, block_size: int, symmetric: bool) -> str:
        """Which kernels an integer format's products run on here, as the library chose by measurement."""
        desc = self._linear(max(block_size, 1), 1, format, block_size, symmetric)
        text = c_char_p()
        self.call("eb_quant_linear_kernels", byref(desc), byref(text))
        return (text.value or b"").decode()

    def run_linear(
        self,
        x: Floats,
        packed: Bytes,
        bias: Floats | None = None,
        *,
        out_features: int,
        format: str,
        block_size: int = 0,
        symmetric: bool = True,
    ) -> Floats:
        """QuantLinear: x [T, K] to [T, N]."""
        tokens, columns = x.shape
        _expect("x", x, "float32", (tokens, columns))
        desc = self._linear(columns, out_features, format, block_size, symmetric)
        size = c_size_t()
        self.call("eb_quant_linear_workspace_size", byref(desc), tokens, byref(size))
        workspace = _poisoned(size.value)
        y = np.full((tokens, out_features), np.nan, np.float32)
        self.call(
            *("eb_quant_linear_run", byref(desc), tokens, _pointer(x), _pointer(packed), packed.nbytes),
            *(_pointer(bias), _pointer(y), _pointer(workspace), workspace.nbytes),
        )
        return y

    def run_embedding(
        self,
        input_ids: NDArray[np.int32],
        packed: Bytes,
        *,
        rows: int,
        columns: int,
        format: str,
        block_size: int = 0,
        symmetric: bool = True,
    ) -> Floats:
        """Embedding: ids [T] to [T, K]; rows is N, columns K."""
        _expect("input_ids", input_ids, "int32", input_ids.shape)
        desc = self._linear(columns, rows, format, block_size, symmetric)
        y = np.full((len(input_ids), columns), np.nan, np.float32)
        self.call(
            *("eb_embedding_run", byref(desc), len(input_ids), _pointer(input_ids)),
            *(_pointer(packed), packed.nbytes, _pointer(y)),
        )
        return y

    def run_attention(
        self,
        qkv: Floats,
        cache: Array,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        rope_interleaved: bool = False,
        norm_epsilon: float = 1e-6,
        latent_dim: int = 0,
        **inputs: Array | None,
    ) -> Floats:
        """PagedAttention, named as in `ops.py`; writes `cache`, of CACHE_DTYPES, in place."""
        cos, table, scales = inputs.get("rope_cos"), inputs["block_table"], inputs.get("cache_scales")
        assert table is not None
        desc = _AttentionDesc(
            *(num_heads, num_kv_heads, head_dim, cache.shape[1 if latent_dim else 2], cache.shape[0]),
            table.shape[1],
            *((0, 0) if cos is None else (2 * cos.shape[1], cos.shape[0])),
            *(rope_interleaved, causal, window, scale, softcap, norm_epsilon),
            *(DTYPES[qkv.dtype.name], CACHE_DTYPES[cache.dtype.name], latent_dim),
            0 if scales is None or scales.ndim < 3 else scales.shape[2],
        )
        tokens, sequences = qkv.shape[0], table.shape[0]
        attention = np.full((tokens, num_heads * (latent_dim or head_dim)), np.nan, np.float32)
        arrays = {**inputs, "qkv": qkv, "cache": cache, "attention": attention}
        pointers = (_pointer(arrays.pop(name, None)) for name in _ATTENTION_POINTERS)
        args = _AttentionArgs(tokens, sequences, *pointers)
        args.cache_offsets = _pointer(arrays.pop("cache_offsets", None))
        for name in _ATTENTION_TIERS:
            if (pool := arrays.pop(name, None)) is not None:
                setattr(desc, f"num_blocks_{name.removeprefix('cache_')}", pool.shape[0])
                setattr(args, name, _pointer(pool))
        if arrays:
            raise PluginError(f"run_attention: no such input: {', '.join(arrays)}")
        ints, size = c_size_t(), c_size_t()
        lengths = (args.query_start, args.kv_len)
        self.call("eb_paged_attention_plan_size", byref(desc), tokens, sequences, byref(ints), byref(size))
        plan = np.full(ints.value, -1, np.int32)
        self.call(
            "eb_paged_attention_plan", byref(desc), tokens, sequences, *lengths, _pointer(plan), len(plan)
        )
        workspace = _poisoned(size.value)
        self.call(
            *("eb_paged_attention_run", byref(desc), byref(args), _pointer(plan), len(plan)),
            *(_pointer(workspace), workspace.nbytes),
        )
        return attention

    def run_add_rms_norm(
        self, x: Floats, residual: Floats, weight: Floats, epsilon: float
    ) -> tuple[Floats, Floats]:
        """AddRMSNorm: (y, sum), each [T, H]."""
        y, total = np.full_like(x, np.nan), np.full_like(x, np.nan)
        pointers = (_pointer(array) for array in (x, residual, weight, y, total))
        desc = _NormDesc(x.shape[1], epsilon, DTYPES[x.dtype.name])
        self.call("eb_add_rms_norm_run", byref(desc), x.shape[0], *pointers)
        return y, total

    def run_gated_activation(self, gate_up: Floats, activation: str) -> Floats:
        """GatedActivation: [T, 2I] to [T, I]."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = np.full((tokens, width), np.nan, np.float32)
        desc = _ActivationDesc(width, ACTIVATIONS[activation], DTYPES[gate_up.dtype.name])
        self.call("eb_gated_activation_run", byref(desc), tokens, _pointer(gate_up), _pointer(y))
        return y

    @staticmethod
    def _linear(columns: int, rows: int, format: str, block_size: int, symmetric: bool) -> _LinearDesc:
        code = WEIGHT_FORMATS[_known_format(format)]
        return _LinearDesc(columns, rows, code, block_size, int(symmetric), DTYPES["float32"])

    def call(self, name: str, *arguments: Any) -> None:
        """One entry point on this library's threads; PluginError with its words where it fails."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        context = _Context(
            ABI_VERSION, self.threads, message=ctypes.addressof(message), message_bytes=MESSAGE_BYTES
        )
        if self.threads > 1:
            context.parallel_for = ctypes.cast(self._parallel_for, c_void_p)
        status = getattr(self._library, name)(byref(context), *arguments)
        if status:
            words = message.value.decode(errors="replace")
            raise PluginError(words or f"{name}: {STATUS_NAMES.get(status, status)}")

    def _run_on_threads(self, _pool: int, count: int, body: Any, argument: int) -> None:
        """The library's parallel_for; ctypes lets go of the interpreter lock inside `body`."""
        with ThreadPoolExecutor(self.threads) as executor:
            list(executor.map(lambda index: body(argument, index), range(count)))


def read_op_table(path: Path, table: str) -> dict[str, int]:
    """A library's table ("Name=version;..."); PluginError for each version that is not the one in `ops.OPS`.

    A library need not have every op: `KernelLibrary.require` asks for those an engine needs.
    """
    has = {name: int(version) for name, _, version in (e.partition("=") for e in table.split(";") if e)}
    knows = {op.name: op.version for op in ops.OPS}
    wrong = [
        f"{name}: library {version}, ops.py {knows.get(name, 'has none')}"
        for name, version in has.items()
        if knows.get(name) != version
    ]
    if wrong:
        raise PluginError(
            f"{path} was compiled from another version ({'; '.join(wrong)}); "
            "compile it again with `make plugins`"
        )
    return has


def _known_format(name: str) -> str:
    if name not in WEIGHT_FORMATS:
        raise PluginError(f"unknown weight format '{name}'; expected one of {', '.join(WEIGHT_FORMATS)}")
    return name


def _expect(name: str, array: Array, dtype: str, shape: Iterable[int]) -> None:
    if array.dtype.name != dtype or array.shape != tuple(shape):
        raise PluginError(f"{name} is {array.dtype.name} {list(array.shape)}, expected {dtype} {list(shape)}")


def _pointer(array: Array | None) -> int | None:
    if array is None:
        return None
    if not array.flags.c_contiguous:
        raise PluginError("kernels read contiguous arrays; pass numpy.ascontiguousarray of it")
    return int(array.ctypes.data)


def _poisoned(size: int) -> Bytes:
    return np.full(size, 0xFF, np.uint8)
