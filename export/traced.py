"""Tracing an HF decoder with its attention replaced by ours: torch.onnx over one ragged step.

The model's own attention modules compute q, k and v, RoPE included; a function registered in transformers'
attention interface emits PagedAttention in place of the scores. torch and transformers are imported only
here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginebay.export.errors import ExportError, UnsupportedModelError
from enginebay.export.spec import Attention, Layer, ModelSpec, Norm, Traced, paged_group
from enginebay.plugins import ops

_NAME = "enginebay_trace"
OPSET = 23
# What attention modules pass along that changes no score: dropout is for training, positions are in q and k.
_HARMLESS = frozenset(
    [
        "dropout",
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "is_causal",
        "past_key_values",
    ]
)


@dataclass
class Step:
    """The step's tensors while the model runs.

    Caches by layer, what describes the step, and what came of it.
    """

    caches: list[Any]
    values: tuple[Any, ...]
    outputs: dict[int, Any] = field(default_factory=dict)
    attentions: dict[int, Attention] = field(default_factory=dict)


def load_model(source: Path) -> Any:
    """The HF model in float32, without running code of the folder.

    Raises ExportError where it cannot be loaded.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ExportError(
            f"exporting without a family needs torch, transformers and onnxscript ({error}): "
            "pip install 'enginebay[torch]'"
        ) from error
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {source} as a causal model: {error}"
        ) from error
    return model.eval()


def trace(model: Any) -> tuple[ir.Model, ModelSpec]:
    """The model as a canonical graph (inputs and outputs as docs/ARCHITECTURE.md lists them), and its spec.

    Raises UnsupportedModelError where the model does not call transformers' attention interface once a
    layer, or passes it something that PagedAttention does not do.
    """
    import torch

    config = model.config.get_text_config()
    count = int(config.num_hidden_layers)
    dynamic = torch.export.Dim.DYNAMIC
    facts = _attention_facts(model, count)
    step = Step([], ())

    class OneStep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            input_ids, position_ids, query_start, kv_len, block_table, slot_mapping, logits_index, caches = (
                inputs
            )
            step.caches = list(caches)
            step.values = (query_start, kv_len, block_table, slot_mapping, position_ids)
            output = self.model(
                input_ids=input_ids[None].long(), position_ids=position_ids[None].long(), use_cache=False
            )
            logits = output.logits[0].index_select(0, logits_index)
            return logits, [step.outputs[layer] for layer in range(count)]

    def integers(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.int32)

    caches = [torch.zeros(7, 2, 4, fact.num_kv_heads, fact.head_dim) for fact in facts]
    arguments = (
        integers(6),
        integers(6),
        integers(3),
        integers(2),
        integers(2, 3),
        integers(6),
        integers(5),
        caches,
    )
    shapes = ({0: dynamic},) * 4 + ({0: dynamic, 1: dynamic}, {0: dynamic}, {0: dynamic})
    with warnings.catch_warnings(), _attention(model, _emit(step)):
        warnings.simplefilter("ignore")
        try:
            program: Any = torch.onnx.export(
                OneStep().eval(),
                arguments,
                dynamo=True,
                dynamic_shapes=((*shapes, [{0: dynamic, 2: dynamic} for _ in caches]),),  # of *inputs
                opset_version=OPSET,
                external_data=False,
                verbose=False,
            )
        except UnsupportedModelError:
            raise
        except Exception as error:  # torch's exporter raises what the model's code makes it raise
            reason = str(error.__cause__ or error).strip().splitlines()
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be traced: {reason[0] if reason else type(error).__name__}"
            ) from error
    layers = tuple(Layer(fact, Traced("traced")) for fact in facts)
    spec = ModelSpec(
        family=str(model.config.model_type),
        architecture=type(model).__name__,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        hidden_size=int(config.hidden_size),
        max_positions=int(config.max_position_embeddings),
        layers=layers,
        final_norm=Norm("rms", 1e-5),
        cache_groups=paged_group(layers),
        tied_embeddings=bool(config.tie_word_embeddings),
    )
    return program.model, spec


def attention_outputs(model: Any, ids: list[int]) -> list[NDArray[np.float32]]:
    """What each layer's attention gives before its output projection, [tokens, heads·head_dim], by the
    model's own code."""
    import sys

    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found: dict[int, NDArray[np.float32]] = {}

    def record(module: Any, *arguments: Any, **options: Any) -> Any:
        own = sys.modules[type(module).__module__].eager_attention_forward
        result = own(module, *arguments, **options)
        found[module.layer_idx] = result[0][0].reshape(result[0].shape[1], -1).numpy()
        return result

    with torch.inference_mode(), _attention(model, record, ALL_MASK_ATTENTION_FUNCTIONS["eager"]):
        model(torch.tensor([ids]), use_cache=False)
    return [found[layer] for layer in sorted(found)]


def _attention_facts(model: Any, count: int) -> list[Attention]:
    """Heads, sizes and options of each layer, from one run of three tokens."""
    import torch

    step = Step([], ())

    def look(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in step.attentions:
            raise UnsupportedModelError(f"{type(module).__name__} calls attention twice, or has no layer_idx")
        step.attentions[layer] = _describe(module, (query, key, value), mask, options)
        return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    with torch.inference_mode(), _attention(model, look):
        try:
            model(torch.tensor([[0, 1, 2]]), use_cache=False)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedModelError(f"{type(model).__name__} does not run: {error}") from error
    if sorted(step.attentions) != list(range(count)):
        raise UnsupportedModelError(
            f"{type(model).__name__} calls transformers' attention interface in layers "
            f"{sorted(step.attentions)} of {count}: "
            "it cannot be exported without a family"
        )
    return [step.attentions[layer] for layer in range(count)]


def _describe(module: Any, states: Sequence[Any], mask: Any, options: dict[str, Any]) -> Attention:
    query, key, value = states
    known = {"scaling", "sliding_window", "softcap", "s_aux"}
    strange = [name for name, item in options.items() if item is not None and name not in known | _HARMLESS]
    if mask is not None:
        strange.append("attention_mask")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        strange.append("is_causal")
    if key.shape != value.shape:
        strange.append("values of another size than keys")
    if strange:
        raise UnsupportedModelError(f"{type(module).__name__} asks attention for {', '.join(strange)}")
    scaling = options.get("scaling")
    return Attention(
        type="attention",
        num_heads=int(query.shape[1]),
        num_kv_heads=int(key.shape[1]),
        head_dim=int(query.shape[3]),
        scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
        rope=None,
        window=int(options.get("sliding_window") or 0),
        softcap=float(options.get("softcap") or 0.0),
        sinks=options.get("s_aux") is not None,
    )


def _emit(step: Step) -> Any:
    """The attention function that puts PagedAttention into the traced graph."""
    import torch

    def rows(x: Any) -> Any:
        return x.transpose(1, 2).reshape(x.shape[2], x.shape[1] * x.shape[3])

    def emit(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        fact = _describe(module, (query, key, value), mask, options)
        cache = step.caches[module.layer_idx]
        qkv = torch.cat([rows(query), rows(key), rows(value)], -1)
        inputs = [qkv, cache, *step.values]
        if fact.sinks:
            inputs += [None] * 4 + [options["s_aux"]]
        width = fact.num_heads * fact.head_dim
        attended, cache_out = torch.onnx.ops.symbolic_multi_out(
            f"{ops.DOMAIN}::{ops.PAGED_ATTENTION.name}",
            inputs,
            {
                "num_heads": fact.num_heads,
                "num_kv_heads": fact.num_kv_heads,
                "head_dim": fact.head_dim,
                "scale": fact.scale,
                "window": fact.window,
                "softcap": fact.softcap,
            },
            dtypes=(torch.float32, torch.float32),
            shapes=((qkv.shape[0], width), cache.shape),
            version=ops.OPSET,
        )
        step.outputs[module.layer_idx] = cache_out
        return attended.reshape(1, qkv.shape[0], fact.num_heads, fact.head_dim), None

    return emit


@contextmanager
def _attention(model: Any, function: Any, mask: Any = None) -> Iterator[None]:
    """`function` as the model's attention, with masks made by `mask` (none by default), while the block
    runs."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, mask or _no_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("eager")
        # The registries keep names for good; nothing of the model must stay behind.
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _no_mask)
        ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _no_mask)


def _no_mask(*_arguments: Any, **_options: Any) -> None:
    """PagedAttention is causal by itself."""
