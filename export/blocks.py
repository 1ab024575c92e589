"""One decoder layer as ONNX nodes: how norms, attention, MLP and residuals are wired."""

from __future__ import annotations

import onnx_ir as ir

from enginebay.export.attention import StepValues, attend
from enginebay.export.emitter import Emitter
from enginebay.export.mixture import mixture
from enginebay.export.nodes import feed_forward, norm, scaled
from enginebay.export.spec import Mlp, ModelSpec, Moe


def decoder_layer(
    emit: Emitter,
    spec: ModelSpec,
    index: int,
    hidden: ir.Value,
    *,
    step: StepValues,
    cache: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """One block: float32 [T, hidden] in and out, and the layer's cache after this step."""
    layer, at = spec.layers[index], f"layers.{index}"
    normed = norm(emit, f"{at}.pre_attention_norm", layer.pre_attention_norm, hidden)
    attended, cache_out = attend(emit, spec, index, normed, step=step, cache=cache)
    attended = norm(emit, f"{at}.post_attention_norm", layer.post_attention_norm, attended)
    attended = scaled(emit, f"{at}.attention.scaled", attended, layer.residual_scale)
    if layer.parallel:
        if layer.pre_mlp_norm is not None:
            normed = norm(emit, f"{at}.pre_mlp_norm", layer.pre_mlp_norm, hidden)
        hidden = emit.op(f"{at}.attention.residual", "Add", [attended, hidden])
    else:
        hidden = emit.op(f"{at}.attention.residual", "Add", [attended, hidden])
        normed = norm(emit, f"{at}.pre_mlp_norm", layer.pre_mlp_norm, hidden)
    if isinstance(layer.mlp, Mlp):
        fed = feed_forward(emit, f"{at}.mlp", layer.mlp, normed)
    else:
        assert isinstance(layer.mlp, Moe), "traced layers have no weights by role"
        fed = mixture(emit, at, layer.mlp, normed, spec.hidden_size)
    fed = norm(emit, f"{at}.post_mlp_norm", layer.post_mlp_norm, fed)
    fed = scaled(emit, f"{at}.mlp.scaled", fed, layer.residual_scale)
    return emit.op(f"{at}.mlp.residual", "Add", [fed, hidden]), cache_out
