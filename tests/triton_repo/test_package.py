"""Model repositories: what is in them, what is refused, and that nothing is left half made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enginebay.builder.manifest import ManifestError
from enginebay.triton_repo import package
from enginebay.triton_repo.backend.settings import ServingSettings, SettingsError
from enginebay.triton_repo.package import PackageConfig, PackageError, escape, fill, package_repo
from enginebay.triton_repo.vendor import module_closure, third_party

ENTRY = "enginebay.triton_repo.backend.service"


@pytest.mark.parametrize(
    ("template", "values", "message"),
    [
        ("a: ${missing}", {}, r"config: no value for placeholder '\$\{missing\}'"),
        ("a: ${key}", {"key": "x${inner}"}, r"placeholder '\$\{inner\}' is left"),
        ("a: ${key}", {"key": "1", "spare": "2"}, r"no placeholder '\$\{spare\}'"),
        ("a: ${key} ${open", {"key": "1"}, r"\$\{open"),
    ],
)
def test_placeholders_that_are_left_are_named(template: str, values: dict[str, str], message: str) -> None:
    with pytest.raises(PackageError, match=message):
        fill(template, values, "config")


def test_values_are_escaped() -> None:
    text = pytest.importorskip("google.protobuf.text_format")
    struct = pytest.importorskip("google.protobuf.struct_pb2")
    value = "a,b:\"c\"\\ 'd' {e} #f\tg\nh é"
    parsed = text.Parse(f'string_value: "{escape(value)}"', struct.Value())
    assert parsed.string_value == value


def test_config_parses_as_tritons_own_message(repository: Path) -> None:
    text = pytest.importorskip("google.protobuf.text_format")
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    config = text.Parse((repository / "llm" / "config.pbtxt").read_text(), messages.ModelConfig())
    assert config.name == "llm"
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled
    assert next((item.name, list(item.dims)) for item in config.input) == ("text_input", [1])
    assert all(item.optional for item in config.input if item.name != "text_input")
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    assert ServingSettings.from_parameters(parameters) == ServingSettings(threads=1, num_blocks=4096)


def test_settings_survive_their_text() -> None:
    settings = ServingSettings(spinning=True, cache_bytes=1 << 40, max_waiting=3, prefix_caching=False)
    text = {key: {"string_value": value} for key, value in settings.parameters().items()}
    assert ServingSettings.from_parameters(text) == settings


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("max_wating", "1", "'max_wating' is unknown"),
        ("threads", "two", "'threads': 'two' is not a whole number or auto"),
        ("threads", "0", "threads: 0 is out of range"),
        ("max_waiting", "auto", "'max_waiting': 'auto' is not a whole number"),
        ("spinning", "yes", "'spinning': 'yes' is neither true nor false"),
    ],
)
def test_bad_settings_are_named(name: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ServingSettings.from_parameters({name: {"string_value": text}})


def test_serving_needs_four_packages(repository: Path) -> None:
    modules = module_closure(ENTRY)
    allowed = {"numpy", "onnxruntime", "tokenizers", "jinja2"}
    assert third_party(modules) - set(sys.stdlib_module_names) == allowed
    packaged = {
        path.relative_to(repository / "llm" / "1" / "lib") for path in repository.rglob("lib/**/*.py")
    }
    assert len(packaged) == len(modules)


def test_packaged_code_runs_without_the_project(repository: Path) -> None:
    """In an interpreter that has no EngineBay: only the folder's own lib is importable."""
    lib = repository / "llm" / "1" / "lib"
    code = (
        "import sys, importlib.metadata as m;"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder)];"
        f"sys.path.insert(0, {str(lib)!r}); import {ENTRY} as s, enginebay.plugins.load as l;"
        "print(s.__file__, l.library_path(), m.distribution('enginebay').metadata['Name'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    service, library, name = result.stdout.split()
    assert Path(service).is_relative_to(lib)
    assert Path(library).is_relative_to(lib)
    assert name == "enginebay"


def test_no_path_leads_outside(repository: Path, served_engine: Path) -> None:
    for path in repository.rglob("*"):
        assert not path.is_symlink()
        if path.suffix in (".py", ".pbtxt", ".json", ".jinja"):
            text = path.read_text()
            assert str(served_engine.parent) not in text
            assert str(repository) not in text


def test_links_and_copies(served_engine: Path, tmp_path: Path) -> None:
    linked = package_repo(served_engine, tmp_path / "linked")
    copied = package_repo(served_engine, tmp_path / "copied", PackageConfig(link=False))
    assert copied.linked == 0
    assert linked.bytes == copied.bytes == sum(path.stat().st_size for path in served_engine.iterdir())
    for repo, same in ((linked, linked.linked == linked.bytes), (copied, False)):
        weights = repo.model / "1" / "engine" / "weights.bin"
        assert os.path.samefile(weights, served_engine / "weights.bin") == same


def test_folders_that_are_no_engines_are_refused(served_engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="is not an engine folder"):
        package_repo(tmp_path, tmp_path / "repo")
    engine = shutil.copytree(served_engine, tmp_path / "engine")
    document = json.loads((engine / "manifest.json").read_text())
    document["target"]["library_version"] = "0.0.1"
    (engine / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=r"target\.library_version: the engine has '0\.0\.1'"):
        package_repo(engine, tmp_path / "repo")
    shutil.copyfile(served_engine / "manifest.json", engine / "manifest.json")
    with (engine / "weights.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ManifestError, match=r"weights\.bin: cut short"):
        package_repo(engine, tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_an_engine_without_a_tokenizer_is_refused(served_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(served_engine, tmp_path / "engine")
    (engine / "tokenizer.json").unlink()
    document = json.loads((engine / "manifest.json").read_text())
    document["files"] = [entry for entry in document["files"] if entry["name"] != "tokenizer.json"]
    (engine / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(PackageError, match=r"tokenizer\.json: no such file"):
        package_repo(engine, tmp_path / "repo")


@pytest.mark.parametrize("name", ["", "../llm", "a b", ".hidden", "x" * 200, 'a"b'])
def test_names_that_cannot_be_a_models(served_engine: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(PackageError, match="name: "):
        package_repo(served_engine, tmp_path / "repo", PackageConfig(name=name))


def test_foreign_folders_are_left_alone(served_engine: Path, tmp_path: Path) -> None:
    (tmp_path / "repo" / "llm").mkdir(parents=True)
    (tmp_path / "repo" / "llm" / "notes.txt").write_text("mine")
    with pytest.raises(PackageError, match="is no Triton model"):
        package_repo(served_engine, tmp_path / "repo")
    assert (tmp_path / "repo" / "llm" / "notes.txt").read_text() == "mine"


def test_a_failure_leaves_the_old_model(
    served_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_repo(served_engine, tmp_path / "repo")
    before = sorted(tmp_path.rglob("*"))

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(package, "copy_modules", full)
        with pytest.raises(OSError, match="No space"):
            package_repo(served_engine, tmp_path / "repo")
    assert sorted(tmp_path.rglob("*")) == before
    package_repo(served_engine, tmp_path / "repo", PackageConfig(settings=ServingSettings(threads=7)))
    assert 'key: "threads" value: { string_value: "7" }' in (tmp_path / "repo/llm/config.pbtxt").read_text()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_repository_is_not_made_among_other_files(served_engine: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "todo.txt").write_text("")
    for folder in (notes, served_engine):
        before = sorted(folder.iterdir())
        with pytest.raises(PackageError, match="has files in it and no Triton model"):
            package_repo(served_engine, folder)
        assert sorted(folder.iterdir()) == before
