"""Targets: where an engine runs. `target(name)` gives one that can be built here, or says why not."""

from __future__ import annotations

from enginebay.builder.targets.base import Target, TargetError
from enginebay.builder.targets.ort_cpu import OrtCpu

TARGETS: dict[str, type[Target]] = {OrtCpu.name: OrtCpu}

# Part of the plan, not of this version: the reason is what a user is told.
PLANNED: dict[str, str] = {
    "ort-cuda": "the CUDA kernels are in plugins/kernels/cuda, but this version builds no engine from them",
    "tensorrt": "it needs EngineBay's TensorRT plugins, which this version does not have",
    "tensorrt-rtx": "it takes no plugins and needs a lowering of its own, which this version does not have",
}


def target(name: str) -> Target:
    """The target called `name`, ready to build; TargetError with the reason otherwise."""
    if name in TARGETS:
        return TARGETS[name]()
    if name in PLANNED:
        raise TargetError(
            f"target {name} is not available yet: {PLANNED[name]}; build for {', '.join(TARGETS)}"
        )
    raise TargetError(f"target '{name}' is unknown; there are {', '.join(TARGETS)}")


__all__ = ["PLANNED", "TARGETS", "Target", "TargetError", "target"]
