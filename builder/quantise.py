"""The stage between reading an exported model and lowering it: formats are chosen, weights quantised,
errors measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx_ir.passes.common import ShapeInferencePass

from enginebay.builder.config import BuildConfig
from enginebay.builder.exported import ExportedModel, read_exported
from enginebay.builder.quant.agreement import EngineError, engine_error
from enginebay.builder.quant.cache import CacheFormat
from enginebay.builder.quant.cache_scales import Constants, StoredCaches, find_constants, stored_scales
from enginebay.builder.quant.calibrate import calibrate
from enginebay.builder.quant.evaluate import Logits, ModelError, compare, exact_weights, quantised_weights
from enginebay.builder.quant.input_rounding import InputRounding
from enginebay.builder.quant.interpreter import Batch
from enginebay.builder.quant.overrides import check_overrides
from enginebay.builder.quant.plan import Quantizer, RoundToNearest, StageProgress
from enginebay.builder.quant.recipes import Recipe
from enginebay.builder.quant.search import Mix, search
from enginebay.builder.quant.text import CalibrationConfig, calibration_batch, default_text, text_batch

SEARCH_SEQUENCES, SEARCH_LENGTH = 4, 128  # a search runs the model once for every other layer
EVALUATION_LENGTH = 256
AGREEMENT_SEQUENCES = 4  # of the evaluation's, for the engine itself beside its weights
CACHE_SEQUENCES = 8  # largest values settle sooner than what weights are calibrated on


@dataclass(frozen=True)
class Quantised:
    """`recipe` as a search left it; `quantizer` gives the weights; `inputs` where they become
    E4M3; `cache_constants` where the cache has any; `mix` and `error` where they were asked for, and then
    `engine_error` too: give it the finished engine.onnx."""

    recipe: Recipe
    quantizer: Quantizer
    inputs: InputRounding = field(default_factory=InputRounding)
    cache_constants: Constants = field(default_factory=dict)
    mix: Mix | None = None
    error: ModelError | None = None
    engine_error: Callable[[Path], EngineError] | None = None


def quantise(
    source: ExportedModel,
    recipe: Recipe,
    config: BuildConfig,
    scratch: Path,
    progress: StageProgress | None = None,
    *,
    cache: CacheFormat,
) -> Quantised:
    """Quantises the weights of `source` by `recipe`: edits its graph where channel scales fold, leaves
    results in `scratch`; finds the constants of `cache` as the quantised weights fill it. QuantizationError
    for a budget that cannot be met, an override that no layer answers to and for what calibration refuses."""
    vocab = source.spec.vocab_size
    ShapeInferencePass()(source.model)
    check_overrides(source.model.graph, config.overrides)
    result = Quantised(recipe, RoundToNearest())
    if config.bits is not None:
        batch = calibration_batch(
            source.folder,
            vocab,
            replace(config.calibration, sequences=SEARCH_SEQUENCES, length=SEARCH_LENGTH),
        )
        recipe, mix = search(source.model.graph, recipe, batch, config.bits, progress)
        result = replace(result, recipe=recipe, mix=mix)
    if recipe.calibrated:
        batch = calibration_batch(source.folder, vocab, config.calibration)
        calibrated = calibrate(source.model, recipe, batch, scratch, progress)
        result = replace(result, quantizer=calibrated, inputs=calibrated.inputs)
    if cache.calibrated.constants:
        result = replace(result, cache_constants=_cache_constants(source, result, cache.calibrated, config))
    if config.evaluate:
        batch = _evaluation_batch(source, config)
        result = replace(
            result,
            error=_evaluate(source, result, cache, batch),
            engine_error=_beside_engine(source, result, config.block_size, batch),
        )
    return result


def _cache_constants(
    source: ExportedModel, quantised: Quantised, cache: CacheFormat, config: BuildConfig
) -> Constants:
    """The checkpoint's where it has them, calibrated on a part of the sequences for the other layers."""
    stored = stored_scales(source.spec, cache)
    if len(stored) == len(source.spec.layers):
        return stored
    few = replace(config.calibration, sequences=min(CACHE_SEQUENCES, config.calibration.sequences))
    batch = calibration_batch(source.folder, source.spec.vocab_size, few)
    weights = quantised_weights(quantised.quantizer, quantised.recipe)
    return {**find_constants(source.model.graph, batch, weights, cache), **stored}


def _evaluation_batch(source: ExportedModel, config: BuildConfig) -> Batch:
    """The text that calibration does not see by default."""
    length = min(EVALUATION_LENGTH, source.spec.max_positions)
    shape = CalibrationConfig(sequences=max(1, config.evaluate // length), length=length)
    text = default_text(1)
    return text_batch(source.folder, source.spec.vocab_size, text, shape, "Python's help topics")


def _evaluate(source: ExportedModel, quantised: Quantised, cache: CacheFormat, batch: Batch) -> ModelError:
    """A second reading gives the model before scales folded."""
    original = read_exported(source.folder).model
    ShapeInferencePass()(original)
    weights = quantised_weights(quantised.quantizer, quantised.recipe)
    stored = StoredCaches(cache, quantised.cache_constants)
    return compare(
        Logits(original.graph, batch, exact_weights),
        Logits(source.model.graph, batch, weights, stored),
        batch,
    )


def _beside_engine(
    source: ExportedModel, quantised: Quantised, block_size: int, batch: Batch
) -> Callable[[Path], EngineError]:
    """What compares an engine with its weights in float32; it keeps the graph as it is before lowering."""
    graph, few = source.model.clone().graph, Batch(batch.sequences[:AGREEMENT_SEQUENCES])
    weights = quantised_weights(quantised.quantizer, quantised.recipe)

    def measure(engine: Path) -> EngineError:
        return engine_error(engine, block_size, Logits(graph, few, weights), few)

    return measure
