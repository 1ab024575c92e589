"""The registry, the documentation and the tests speak of the same architectures."""

from __future__ import annotations

import re
from pathlib import Path

import test_families
import test_moe_families
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from enginebay.export.families import FAMILIES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def test_the_table_in_the_docs_is_the_registry() -> None:
    rows = re.findall(r"^\| (\w+) \| (\w+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows[0:]) == {"architecture": "model_type"} | {f.architecture: f.model_type for f in FAMILIES}


def test_transformers_knows_every_pair_of_names() -> None:
    for family in FAMILIES:
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type] == family.architecture


def test_every_family_is_proved() -> None:
    proved = {
        kind.model_type for kind, _ in (*test_families.MODELS.values(), *test_moe_families.MODELS.values())
    }
    assert {family.model_type for family in FAMILIES} == proved | {
        "llama",
        "gemma3",
    }  # which have tests of their own


def test_the_worked_example_is_the_family_itself() -> None:
    example = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    source = (DOCUMENT.parents[1] / "export" / "families" / "olmo2.py").read_text(encoding="utf-8")
    assert example.strip() in source
