"""`build_engine`: an exported model becomes an engine folder."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginebay.builder.config import BuildConfig, BuildError
from enginebay.builder.exported import ExportedModel, read_exported
from enginebay.builder.manifest import (
    ENGINE,
    MANIFEST,
    SCALES,
    SCHEMA_VERSION,
    WEIGHTS,
    CacheGroupRecord,
    EngineManifest,
    FileRecord,
    LayerRecord,
    LimitsRecord,
    PluginRecord,
    QuantizationRecord,
    TierRecord,
    enginebay_version,
)
from enginebay.builder.packing import WeightPacker
from enginebay.builder.quant.cache import CacheFormat, find_cache
from enginebay.builder.quant.plan import StageProgress
from enginebay.builder.quant.recipes import Recipe, recipe
from enginebay.builder.quantise import quantise
from enginebay.builder.report import BuildReport
from enginebay.builder.targets import Target, target
from enginebay.builder.targets.base import CacheLayout
from enginebay.builder.weights import SidecarWriter, check_finite_tensor
from enginebay.export.staging import obstacle, scratch_folder, staged
from enginebay.plugins import ops

INLINE_BYTES = 1024  # initializers up to this size stay in engine.onnx
DEFAULT_SEQUENCE = 8192


__all__ = ["ENGINE", "BuildConfig", "BuildError", "build_engine", "choose"]


def build_engine(
    exported: Path, out: Path, config: BuildConfig | None = None, progress: StageProgress | None = None
) -> BuildReport:
    """Builds `exported` into the engine folder `out`, which appears whole or not at all.

    Weights stream from sidecar to sidecar; memory stays near one chunk of one tensor. An engine already at
    `out` is replaced, any other folder with files in it is refused. Raises ExportedError,
    QuantizationError, TargetError or BuildError; nothing is left behind then. `progress` counts layers while
    weights are searched for and calibrated, then bytes while they are written.
    """
    started = time.monotonic()
    config = config or BuildConfig()
    chosen, where, cache_format = choose(config)
    source = read_exported(exported)
    limits = _limits(source, config)
    cache_groups = _cache_groups(source, cache_format, config)
    _check_output(out, exported)
    _check_vectors(source.model.graph)
    with staged(out) as folder, scratch_folder(out.parent, f".{out.name}.calibration-") as scratch:
        quantised = quantise(source, chosen, config, scratch, progress, cache=cache_format)
        cache = CacheLayout(cache_format, config.block_size, quantised.cache_constants)
        packer = WeightPacker(quantised.recipe, where.plugins, quantised.quantizer, quantised.inputs)
        rewrites = where.lower(source.model, packer, cache)
        weight_bytes = _write_weights(source.model.graph, folder / WEIGHTS, packer, progress)
        _name_engine(source.model, where)
        ir.save(source.model, folder / ENGINE)
        rounded = None if quantised.engine_error is None else quantised.engine_error(folder / ENGINE)
        for path in source.companions:
            shutil.copyfile(path, folder / path.name)
        if cache_format.tiers:  # what converts blocks reads them; the graph has its own
            np.savez(folder / SCALES, **dict(cache.constants))
        layers = {
            result.layer: LayerRecord(result.format.key, result.method, result.shape, result.packed_bytes)
            for result in packer.results
        }
        manifest = EngineManifest(
            schema_version=SCHEMA_VERSION,
            enginebay_version=enginebay_version(),
            source=source.source,
            config=config.to_dict(),
            model=source.spec_document,
            target=where.record,
            plugins=PluginRecord(_ops(source.model.graph), packer.layouts, where.plugins.sha256),
            opset=source.model.graph.opset_imports[""],
            quantization=QuantizationRecord(chosen.name, layers),
            cache_groups=cache_groups,
            limits=limits,
            files=(
                FileRecord.of(folder / ENGINE),
                FileRecord.of(folder / WEIGHTS),
                *(FileRecord.of(path) for path in folder.glob(SCALES)),
                *(FileRecord.of(folder / path.name) for path in source.companions),
            ),
            weight_bytes=weight_bytes,
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            build_seconds=round(time.monotonic() - started, 3),
        )
        report = BuildReport(
            engine=out,
            manifest=manifest,
            layers=tuple(packer.results),
            rewrites=tuple(rewrites),
            nodes=source.model.graph.num_nodes(),
            seconds=time.monotonic() - started,
            error=quantised.error,
            engine_error=rounded,
            mix=quantised.mix,
            cache_constants=cache.constants,
        )
        report.save(folder)
        manifest.save(folder)
    return report


def choose(config: BuildConfig) -> tuple[Recipe, Target, CacheFormat]:
    """The recipe, the target and the cache's format that `config` names. QuantizationError or TargetError for
    unknown ones."""
    chosen = recipe(config.quant).with_blocks(config.weight_block, config.weight_symmetric)
    cache = find_cache(config.kv_cache, chosen.cache)
    return chosen.with_overrides(config.overrides), target(config.target), cache


def _check_vectors(graph: ir.Graph) -> None:
    """Norms and biases are small: what is wrong with them is said before hours of calibration. Matrices are
    checked as they are quantised or written."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and len(tensor.shape) < 2:
            check_finite_tensor(tensor)


def _limits(source: ExportedModel, config: BuildConfig) -> LimitsRecord:
    longest = source.spec.max_positions
    if config.max_sequence is not None and config.max_sequence > longest:
        raise BuildError(
            f"max_sequence {config.max_sequence} is more than the {longest} positions "
            f"of {source.spec.architecture}"
        )
    sequence = config.max_sequence or min(longest, DEFAULT_SEQUENCE)
    return LimitsRecord(config.max_batch, config.max_step_tokens, sequence, source.spec.vocab_size)


def _cache_groups(
    source: ExportedModel, cache: CacheFormat, config: BuildConfig
) -> tuple[CacheGroupRecord, ...]:
    """QuantizationError where the format cannot hold the model's keys and values."""
    groups = []
    for group in source.spec.cache_groups:
        values = group.block_shape(config.block_size)
        tiers = tuple(
            TierRecord(tier.dtype, age, tier.block_shape(values))
            for tier, age in zip(cache.tiers, config.cache_ages, strict=False)
        )
        groups.append(
            CacheGroupRecord(
                kind=group.kind,
                layers=group.layers,
                dtype=cache.dtype,
                block_size=config.block_size,
                block_shape=cache.block_shape(values),
                constant_shape=cache.calibrated.constant_shape(values),
                tiers=tiers,
            )
        )
    return tuple(groups)


def _write_weights(graph: ir.Graph, path: Path, packer: WeightPacker, progress: StageProgress | None) -> int:
    """Moves every large initializer into the sidecar `path`; its bytes."""
    total = sum(_nbytes(value) for value in graph.initializers.values())
    done = 0
    with SidecarWriter(path) as sidecar:
        for name, value in graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            size = tensor.nbytes
            shape = tuple(int(dim) for dim in tensor.shape.numpy())
            if packer.is_packed(name):
                value.const_value = sidecar.write(
                    name, tensor.dtype, shape, (part.data for part in packer.pack(name))
                )
            elif size > INLINE_BYTES:
                if isinstance(tensor, ir.ExternalTensor):
                    check_finite_tensor(tensor)
                value.const_value = sidecar.write(name, tensor.dtype, shape, [tensor.tobytes()])
            elif isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.tensor(tensor.numpy().copy(), name=name)
            done += size
            if progress is not None:
                progress(done, total, name)
        return sidecar.nbytes


def _ops(graph: ir.Graph) -> dict[str, int]:
    """The EngineBay ops of the graph and their versions."""
    used = {node.op_type for node in graph.all_nodes() if node.domain == ops.DOMAIN}
    return {name: ops.op(name).version for name in sorted(used)}


def _nbytes(value: ir.Value) -> int:
    assert value.const_value is not None
    return value.const_value.nbytes


def _name_engine(model: ir.Model, where: Target) -> None:
    model.producer_name, model.producer_version = "enginebay", enginebay_version()
    model.metadata_props["enginebay.graph"] = where.record.name


def _check_output(out: Path, exported: Path) -> None:
    reason = obstacle(out, exported)
    if reason is not None:
        raise BuildError(reason)
    if out.exists() and not (out / MANIFEST).is_file() and any(out.iterdir()):
        raise BuildError(f"{out}: exists and is not an engine folder; choose another place or remove it")
