"""An engine folder of target ort-cpu in ONNX Runtime, with its cache pools written in place."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from numpy.typing import NDArray

from enginebay.builder.manifest import CacheGroupRecord, EngineManifest, RuntimeFacts
from enginebay.plugins import ops
from enginebay.plugins.load import KernelLibrary, library_hash
from enginebay.plugins.load_cache import convert_cache
from enginebay.triton_repo.runtime.engine import EngineLimits, Move, StepInputs, Tier
from enginebay.triton_repo.runtime.machine import available_memory, usable_cpus
from enginebay.triton_repo.runtime.tiers import least_blocks, move_batches

_log = logging.getLogger(__name__)

_GRAPH = "engine.onnx"
_SCALES = "cache_scales.npz"  # of int8 pools that blocks are converted to
_TIER_SHARES = (0.25, 0.25, 0.5)  # of the budget: float16, int8, int4
_MOST_CACHE_BYTES = 4 << 30  # of the default budget
_SPIN_US = 50  # that an idle thread waits busily before it sleeps
_STEP_INPUTS = {
    "input_ids": "input_ids",
    "position_ids": "position_ids",
    "query_start": "query_start",
    "kv_len": "kv_len",
    "block_table.0": "block_table",
    "slot_mapping.0": "slot_mapping",
    "logits_index": "logits_index",
}
# dtype of a pool: the numpy type that holds its bits, ONNX's number for its elements.
_CACHE_TYPES: dict[str, tuple[type[np.generic], int]] = {
    "float32": (np.float32, 1),
    "float16": (np.float16, 10),
    "bfloat16": (np.uint16, 16),
    "int8": (np.int8, 3),
    "float8e4m3fn": (np.uint8, 17),
    "int4": (np.uint8, 2),
}


class EngineLoadError(RuntimeError):
    """A folder whose engine cannot run here although its manifest fits. The message names file and cause."""


@dataclass(frozen=True)
class EngineOptions:
    """How to run an engine.

    threads       of the kernels; None: every core this process may use
    spinning      idle threads wait busily between steps too: wasteful beside a server
    cache_bytes   for the cache pools; None: a quarter of the memory available, 4 GiB at most
    num_blocks    of the pools, instead of `cache_bytes`; with tiers of each
    """

    threads: int | None = None
    spinning: bool = False
    cache_bytes: int | None = None
    num_blocks: int | None = None


class OrtEngine:
    """Runs steps. Not thread-safe.

    Loading refuses a folder whose manifest does not fit (ManifestError, PluginError), whose session cannot be
    made, or whose caches would not be updated in place (EngineLoadError naming the layer). `notes` are the
    accepted differences.
    """

    def __init__(self, folder: Path, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        self.manifest = EngineManifest.load(folder)
        library = KernelLibrary()
        self.notes = tuple(self.manifest.check(folder, machine_facts(self.manifest, library)))
        for note in self.notes:
            _log.info("%s", note)
        kinds = [group.kind for group in self.manifest.cache_groups]
        if kinds not in (["paged"], ["latent"]):
            raise EngineLoadError(f"{folder}: cache groups {kinds}; this runtime serves one, paged or latent")
        group = self.manifest.cache_groups[0]
        limits = self.manifest.limits
        sizes = _block_counts(self.manifest, options)
        self._limits = EngineLimits(
            vocab_size=limits.vocab_size,
            max_sequence=limits.max_sequence,
            max_batch=limits.max_batch,
            max_step_tokens=limits.max_step_tokens,
            block_size=group.block_size,
            num_blocks=sizes[0],
            rope_switch=_rope_switch(self.manifest.model),
            tiers=tuple(Tier(size, tier.age) for size, tier in zip(sizes[1:], group.tiers, strict=True)),
        )
        _check_tiers(folder, self._limits, group)
        self._library = library
        self._session = _session(folder / _GRAPH, library.path, options)
        self._layers = group.layers
        self._tier_names = [f"cache_{tier.dtype}" for tier in group.tiers]
        self._check_signature(folder / _GRAPH)
        self._tiers: list[list[NDArray[Any]]] = [
            [_allocated("cache pools", (size, *shape), _CACHE_TYPES[dtype][0]) for _ in group.layers]
            for size, (dtype, shape) in zip(sizes, group.pools, strict=True)
        ]
        self._pools = self._tiers[0]
        self._scales = _scales(folder, group)
        self._logits: NDArray[np.float32] = _allocated(
            "logits of max_batch rows", (limits.max_batch, limits.vocab_size), np.float32
        )
        self._binding = self._session.io_binding()
        element_type = _CACHE_TYPES[group.dtype][1]
        for layer, pool in zip(self._layers, self._pools, strict=True):
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(pool, element_type)
            self._binding.bind_ortvalue_input(f"cache.{layer}", value)
            self._binding.bind_ortvalue_output(f"cache_out.{layer}", value)
        for name, tier, pools in zip(self._tier_names, group.tiers, self._tiers[1:], strict=True):
            for layer, pool in zip(self._layers, pools, strict=True):
                value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(pool, _CACHE_TYPES[tier.dtype][1])
                self._binding.bind_ortvalue_input(f"{name}.{layer}", value)
        self._probe(folder / _GRAPH)

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `Engine.run`. Raises what ONNX Runtime raises where a kernel refuses its input."""
        binding = self._binding
        for name, field in _STEP_INPUTS.items():
            array = getattr(inputs, field)
            binding.bind_input(name, "cpu", 0, np.int32, array.shape, array.ctypes.data)
        rows = len(inputs.logits_index)
        if rows > len(self._logits):
            self._logits = np.empty((rows, self._limits.vocab_size), np.float32)
        logits = self._logits[:rows]
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits

    def move(self, moves: Sequence[Move]) -> None:
        """See `Engine.move`."""
        for source, into, pairs in move_batches(moves, [len(pools[0]) for pools in self._tiers]):
            for index in range(len(self._layers)):
                pools = self._tiers[source][index], self._tiers[into][index]
                scaled = any(pool.dtype == np.int8 for pool in pools)
                convert_cache(self._library, *pools, pairs, self._scales[index] if scaled else None)

    def _check_signature(self, path: Path) -> None:
        """Refuses a graph whose inputs or outputs are not those of docs/ARCHITECTURE.md, or whose caches and
        logits are not of the manifest's shapes and types."""
        group = self.manifest.cache_groups[0]
        caches: dict[str, tuple[int, ...]] = {}
        for name, (_, shape) in zip(("cache", *self._tier_names), group.pools, strict=True):
            caches |= {f"{name}.{layer}": shape for layer in self._layers}
        outputs = {f"cache_out.{layer}": group.block_shape for layer in self._layers}
        for what, found, rest, expected in (
            ("inputs", self._session.get_inputs(), set(_STEP_INPUTS), caches),
            (
                "outputs",
                self._session.get_outputs(),
                set(),
                {"logits": (self._limits.vocab_size,), **outputs},
            ),
        ):
            names, wanted = {value.name for value in found}, {*rest, *expected}
            if names != wanted:
                raise EngineLoadError(
                    f"{path}: {what} differ from this runtime's: missing {sorted(wanted - names)}, "
                    f"unknown {sorted(names - wanted)}"
                )
            for value in found:
                behind = expected.get(value.name)
                if behind is not None and tuple(value.shape[1:]) != behind:
                    raise EngineLoadError(
                        f"{path}: {value.name} has the shape {value.shape}, but manifest.json says "
                        f"{list(behind)} behind the first; build the engine again"
                    )

    def _probe(self, path: Path) -> None:
        """Runs one token and refuses an engine that does not write exactly its slot of every pool."""
        for pool in self._pools:
            pool[0].view(np.uint8)[...] = 0xFF
        zero = np.zeros(1, np.int32)
        one = np.ones(1, np.int32)
        step = StepInputs(zero, zero, np.array([0, 1], np.int32), one, zero.reshape(1, 1), zero, zero)
        logits = self.run(step)
        if not np.isfinite(logits).all():
            raise EngineLoadError(f"{path}: the logits of a probe token are not finite")
        for layer, pool in zip(self._layers, self._pools, strict=True):
            # [2, block_size, heads, bytes of a head], or [block_size, bytes of a latent]
            bits = pool[0].view(np.uint8)
            by_slot = np.moveaxis(bits, 1 if bits.ndim == 4 else 0, 0).reshape(self._limits.block_size, -1)
            untouched = (by_slot == 0xFF).all(axis=1)
            if untouched[0] or not untouched[1:].all():
                raise EngineLoadError(
                    f"{path}: layer {layer} does not write its cache in place: after a probe token in slot 0 "
                    f"the slots that changed are {np.flatnonzero(~untouched).tolist()}"
                )
            pool[0] = 0


def machine_facts(manifest: EngineManifest, library: KernelLibrary) -> RuntimeFacts:
    """This machine, with the layouts of the formats that the engine holds."""
    layouts = {}
    for record in manifest.quantization.layers.values():
        rows, columns = record.shape
        kind, block, symmetric = _parse_format(record.format)
        # As WeightFormat.layout_key names them: a scale for each row depends on the row's length.
        by_row = kind in ("i8", "f8") and block == 0
        key = f"{record.format}.k{columns}" if by_row else record.format
        if key in layouts:
            continue
        layouts[key] = library.linear_layout(
            rows=rows,
            columns=columns,
            format=kind,
            block_size=columns if by_row else block,
            symmetric=symmetric,
        )
    return RuntimeFacts(
        target="ort-cpu",
        library="onnxruntime",
        library_version=ort.__version__,
        ops={op.name: op.version for op in ops.OPS},  # as loading the library checked
        layouts=layouts,
        plugin_sha256=library_hash(library.path),
    )


def _parse_format(key: str) -> tuple[str, int, bool]:
    """Kind, block size (0: none, or a row) and symmetry out of a key such as f16, i8 or i4.b32.asym."""
    kind, *rest = key.split(".")
    block = next((int(part[1:]) for part in rest if part[:1] == "b" and part[1:].isdigit()), 0)
    return kind, block, "asym" not in rest


def _rope_switch(model: Mapping[str, Any]) -> int:
    """ModelSpec.rope_switch of the manifest's model: the longest sequence that reads the first RoPE table."""
    switching = (rope for rope in model.get("ropes", ()) if rope["kind"] in ("longrope", "dynamic"))
    return next((int(rope["original_positions"]) for rope in switching), 0)


def _block_counts(manifest: EngineManifest, options: EngineOptions) -> list[int]:
    """Of every pool: as `num_blocks` says, or the budget, of which each pool has its share."""
    group, limits = manifest.cache_groups[0], manifest.limits
    if options.num_blocks is not None:
        blocks = [options.num_blocks] * len(group.pool_bytes)
    else:
        budget = options.cache_bytes
        if budget is None:
            budget = min(available_memory() // 4, _MOST_CACHE_BYTES)
        # More than every sequence at its longest is never used.
        most = limits.max_batch * -(-limits.max_sequence // group.block_size)
        shares = _TIER_SHARES if group.tiers else (1.0,)
        blocks = [
            min(int(budget * share) // size, most)
            for share, size in zip(shares, group.pool_bytes, strict=True)
        ]
    if blocks[0] < 1:
        raise EngineLoadError(
            f"the cache budget of {options.cache_bytes if options.num_blocks is None else blocks[0]} holds "
            f"no block of {group.block_bytes} bytes ({group.block_size} tokens over {len(group.layers)} "
            "layers)"
        )
    return blocks


def _check_tiers(folder: Path, limits: EngineLimits, group: CacheGroupRecord) -> None:
    """Refuses pools that a sequence at its longest does not find room in."""
    if not limits.tiers:
        return
    sizes = [limits.num_blocks, *(tier.num_blocks for tier in limits.tiers)]
    for (dtype, _), size, least in zip(group.pools, sizes, least_blocks(limits), strict=True):
        if size < least:
            raise EngineLoadError(
                f"{folder}: the {dtype} cache pool has {size} blocks of {limits.block_size} tokens, a "
                f"sequence needs {least}: allow more cache memory, or build with lower cache_ages"
            )


def _scales(folder: Path, group: CacheGroupRecord) -> list[NDArray[np.float32]]:
    """Of each layer where the cache has tiers, of the manifest's shape. EngineLoadError for another file."""
    if not group.tiers:
        return []
    path = folder / _SCALES
    try:
        with np.load(path, allow_pickle=False) as file:
            scales = [file[f"cache.{layer}"] for layer in group.layers]
    except Exception as error:  # zipfile and numpy raise many kinds for bytes that are no archive of arrays
        raise EngineLoadError(
            f"{path}: not the scales of a cache: {error}; build the engine again"
        ) from error
    for layer, scale in zip(group.layers, scales, strict=True):
        if scale.dtype != np.float32 or scale.shape != group.constant_shape:
            raise EngineLoadError(
                f"{path}: cache.{layer} is {scale.dtype} {list(scale.shape)}, but manifest.json says float32 "
                f"{list(group.constant_shape)}; build the engine again"
            )
    return scales


def _allocated(what: str, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Zeros; pages come from the system as they are first written. EngineLoadError where there is no room."""
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address can name
        raise EngineLoadError(f"{what} of {list(shape)} {np.dtype(dtype)} do not fit in memory") from error


def _session(graph: Path, library: Path, options: EngineOptions) -> ort.InferenceSession:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads or usable_cpus()
    settings.inter_op_num_threads = 1
    settings.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    settings.enable_mem_pattern = False  # shapes change from step to step; patterns would be kept for each
    settings.log_severity_level = 4  # errors arrive as exceptions
    # Between the operators of a step a busy wait is over before a sleeping thread would have woken: it takes
    # less processor time, not more. Between steps threads sleep, unless asked to spin.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1")
    if not options.spinning:
        settings.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    settings.register_custom_ops_library(str(library))
    try:
        return ort.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise EngineLoadError(f"{graph}: ONNX Runtime cannot load it: {error}") from error
