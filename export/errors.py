"""Errors of this room. Every message names the thing, the values that disagree and what to do."""

from __future__ import annotations


class ExportError(ValueError):
    """The model cannot be exported as it is."""


class UnsupportedModelError(ExportError):
    """A well-formed model with an architecture, or a value in its config, that no family covers."""


class CheckpointError(ExportError):
    """The weight files are damaged, incomplete, or not those that the config describes."""
