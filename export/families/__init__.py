"""The registry of architectures: HF `architectures` and `model_type` to a Family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.export.config import Config
from enginebay.export.errors import UnsupportedModelError
from enginebay.export.families import (
    cohere2,
    deepseek,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen,
    qwen_moe,
    smollm3,
)
from enginebay.export.families.base import Family
from enginebay.export.spec import ModelSpec

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gemma.GEMMA3_IMAGES,
    phi3.FAMILY,
    smollm3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    cohere2.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    mixtral.FAMILY,
    qwen_moe.QWEN2_MOE,
    qwen_moe.QWEN3_MOE,
    olmoe.FAMILY,
    gpt_oss.FAMILY,
    gpt_oss.MXFP4,
    deepseek.V2,
    deepseek.V3,
)


def find_family(values: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises UnsupportedModelError naming the architecture and what is supported.
    """
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UnsupportedModelError(
            f"config.json: 'architectures' is {architectures!r}: must name exactly one"
        )
    architecture = architectures[0]
    quantised = values.get("quantization_config")
    quantization = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
    for family in sorted(FAMILIES, key=lambda family: family.quantization != quantization):
        if family.architecture == architecture:
            if values.get("model_type") != family.model_type:
                raise UnsupportedModelError(
                    f"config.json: architecture {architecture} goes with model_type '{family.model_type}', "
                    f"it says {values.get('model_type')!r}"
                )
            return family
    known = ", ".join(dict.fromkeys(family.architecture for family in FAMILIES))
    causal = str(architecture).endswith(("ForCausalLM", "LMHeadModel"))
    reason = (
        "it may export with --generic, through transformers"
        if causal
        else "it is not a causal language model"
    )
    raise UnsupportedModelError(
        f"config.json: architecture {architecture!r} is not supported: {reason}. Supported: {known}"
    )


def read_spec(values: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """Family and spec of a config.json.

    Raises UnsupportedModelError or SpecError; every key of the config is accounted for.
    """
    family = find_family(values)
    config = Config(values)
    spec = family.spec(config)
    if not family.quantization:
        config.ignore("quantization_config")  # enginebay.export.quantized reads it
    config.finish()
    return family, spec
