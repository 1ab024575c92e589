"""Building the library: what is compiled, what is kept, and where the ONNX Runtime headers come from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from enginebay.plugins import build, ort_headers
from enginebay.plugins.load import KernelLibrary, library_path
from enginebay.plugins.ort_headers import HEADER, HeadersNotFoundError

NO_APT = Path("/nonexistent")


def headers_in(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / HEADER).touch()
    return directory


def test_headers_in_order(tmp_path: Path) -> None:
    """The environment, then the system, then what was fetched before."""
    wish, system = headers_in(tmp_path / "wish"), headers_in(tmp_path / "system")
    fetched = headers_in(tmp_path / "cache/usr/include/onnxruntime")
    cache, other = tmp_path / "cache", tmp_path / "none"
    environment = {ort_headers.ENVIRONMENT: str(wish)}
    assert ort_headers.find(cache, environment=environment, system=[system], apt=NO_APT) == wish
    assert ort_headers.find(cache, environment={}, system=[other, system], apt=NO_APT) == system
    assert ort_headers.find(cache, environment={}, system=[other], apt=NO_APT) == fetched


def test_a_wrong_wish_is_not_overruled(tmp_path: Path) -> None:
    system = headers_in(tmp_path / "system")
    environment = {ort_headers.ENVIRONMENT: str(tmp_path)}
    with pytest.raises(HeadersNotFoundError, match=f"{ort_headers.ENVIRONMENT}={tmp_path} holds no {HEADER}"):
        ort_headers.find(tmp_path, environment=environment, system=[system], apt=NO_APT)


FAKE_APT = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *download*) : > libonnxruntime-dev_1.deb ;;
  *update*) cat $(echo "$@" | sed 's/.*SourceList=\\([^ ]*\\).*/\\1/') >> {log} ;;
esac
exit {status}
"""
FAKE_DPKG = """#!/bin/sh
mkdir -p "$3/usr/include/onnxruntime" && : > "$3/usr/include/onnxruntime/onnxruntime_cxx_api.h"
"""


def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> Path:
    """apt-get and dpkg that only note what they were asked; the log."""
    log, tools = tmp_path / "log", tmp_path / "tools"
    tools.mkdir()
    for name, text in (("apt-get", FAKE_APT.format(log=log, status=status)), ("dpkg", FAKE_DPKG)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return log


def debian_sources(tmp_path: Path, text: str, name: str = "sources.list.d/debian.sources") -> Path:
    apt = tmp_path / "apt"
    (apt / name).parent.mkdir(parents=True)
    (apt / name).write_text(text)
    return apt


DEB822 = """Types: deb
# a comment
URIs: https://mirror.example/debian-security
Suites: bookworm-security

Types: deb
URIs: https://mirror.example/debian
Suites: bookworm
"""


def test_headers_from_the_systems_own_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_tools(tmp_path, monkeypatch, status=0)
    apt = debian_sources(tmp_path, DEB822)
    found = ort_headers.find(tmp_path / "cache", environment={}, system=[], apt=apt)
    assert (found / HEADER).is_file()
    said = log.read_text()
    assert f"{ort_headers.KEYRING}] https://mirror.example/debian {ort_headers.RELEASE} main" in said
    assert "download libonnxruntime-dev" in said
    assert "Dir::Etc::SourceParts=/dev/null" in said
    log.unlink()
    assert ort_headers.find(tmp_path / "cache", environment={}, system=[], apt=apt) == found
    assert not log.exists(), "fetched once"


def test_every_way_is_named_where_none_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tools(tmp_path, monkeypatch, status=100)
    apt = debian_sources(tmp_path, DEB822)
    with pytest.raises(HeadersNotFoundError) as error:
        ort_headers.find(tmp_path / "cache", environment={}, system=[tmp_path / "sys"], apt=apt)
    for part in (
        f"{ort_headers.ENVIRONMENT}: not set",
        f"{tmp_path / 'sys'}: no {HEADER}",
        "apt-get failed with status 100",
    ):
        assert part in str(error.value)


def test_a_system_that_is_not_debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HeadersNotFoundError, match="apt-get is not on this system"):
        ort_headers.find(tmp_path, environment={}, system=[], apt=NO_APT)
    fake_tools(tmp_path, monkeypatch, status=0)
    apt = debian_sources(tmp_path, "deb http://archive.example/ubuntu noble main\n", "sources.list")
    with pytest.raises(HeadersNotFoundError, match=f"no Debian archive among the sources of {apt}"):
        ort_headers.find(tmp_path, environment={}, system=[], apt=apt)


@pytest.mark.parametrize(
    "line",
    [
        "deb http://m.example/debian bookworm main",
        "deb [arch=amd64 signed-by=/k.gpg] http://m.example/debian bookworm main",
        "# deb http://old.example/debian x\ndeb-src http://s.example/debian x\ndeb http://m.example/debian y",
    ],
)
def test_one_line_sources(tmp_path: Path, line: str) -> None:
    apt = debian_sources(tmp_path, line + "\n", "sources.list")
    assert ort_headers.debian_mirror(apt) == "http://m.example/debian"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-g++")
    with pytest.raises(build.BuildError, match=r"'no-such-g\+\+' is not on PATH; install g\+\+"):
        build.build(tmp_path, tmp_path / "out.so")
    assert build.main(["--build-dir", str(tmp_path)]) == 1


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A source tree of two kernels and an adapter that needs a header of ONNX Runtime's name."""
    root = tmp_path / "plugins"
    for folder in ("include", "kernels/cpu/deep", "adapters/ort"):
        (root / folder).mkdir(parents=True)
    (root / "include/shared.h").write_text("#define ANSWER 42\n")
    (root / "kernels/cpu/one.cc").write_text('#include "shared.h"\nextern "C" int one() { return ANSWER; }\n')
    (root / "kernels/cpu/deep/two_avx2.cc").write_text(
        "#ifndef __AVX2__\n#error flags\n#endif\nint two() { return 2; }\n"
    )
    (root / "adapters/ort/three.cc").write_text(
        f"#include <{HEADER}>\n#ifndef ORT_API_MANUAL_INIT\n#error\n#endif\nint three() {{ return 3; }}\n"
    )
    return root


def make(root: Path) -> list[str]:
    """Compile what is stale; the names of those sources."""
    units = build.units("g++", root.parent / "obj", headers_in(root.parent / "ort"), root)
    stale = [unit for unit in units if not unit.up_to_date()]
    for unit in stale:
        build._compile(unit)
    build._link("g++", units, root.parent / "lib.so", relink=bool(stale))
    return sorted(unit.source.name for unit in stale)


def test_incremental(small_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(small_tree) == ["one.cc", "three.cc", "two_avx2.cc"]
    assert make(small_tree) == []
    assert "lib.so is up to date" in capsys.readouterr().out
    header = small_tree / "include/shared.h"
    os.utime(header, ns=(header.stat().st_atime_ns, header.stat().st_mtime_ns + 3_600_000_000_000))
    assert make(small_tree) == ["one.cc"]
    shutil.copy(small_tree / "kernels/cpu/one.cc", small_tree / "kernels/cpu/new.cc")
    (small_tree / "kernels/cpu/new.cc").write_text("int fresh() { return 5; }\n")
    os.utime(header, ns=(0, 0))
    assert make(small_tree) == ["new.cc"]


def test_other_flags_compile_again(small_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(small_tree)
    monkeypatch.setattr(build, "CXX_FLAGS", (*build.CXX_FLAGS, "-DOTHER"))
    assert make(small_tree) == ["one.cc", "three.cc", "two_avx2.cc"]


def test_a_mistake_in_a_source_is_reported(small_tree: Path) -> None:
    (small_tree / "kernels/cpu/one.cc").write_text("int broken(\n")
    with pytest.raises(build.BuildError, match=r"compiling .*one\.cc failed with status"):
        make(small_tree)
    with pytest.raises(build.BuildError, match="no C\\+\\+ source below"):
        build.units("g++", small_tree, small_tree, small_tree / "include")


def test_kernels_know_no_framework() -> None:
    """Only the adapter may include ONNX Runtime's headers."""
    sources = [p for p in (build.HERE / "kernels/cpu").rglob("*") if p.suffix in (".cc", ".h")]
    assert len(sources) > 10
    for source in sources:
        assert "onnxruntime" not in source.read_text(), source


def test_code_of_an_instruction_set_is_not_shared() -> None:
    """A weak symbol in an object with ISA flags could replace the baseline's copy of an inline function."""
    objects = [
        unit.object
        for unit in build.units("g++", build.default_build_directory() / "obj", Path("/"))
        if build.isa_flags(unit.source)
    ]
    compiled = [path for path in objects if path.is_file()]
    assert compiled, "compile first: python -m enginebay.plugins.build"
    for path in compiled:
        table = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        weak = re.findall(r"^\S+ [WVu] .*$", table, re.MULTILINE)
        assert not weak, f"{path.name}: {weak}"


def test_the_library_exports_the_abi_alone() -> None:
    table = subprocess.run(
        ["nm", "-D", "--defined-only", str(library_path())], capture_output=True, text=True, check=True
    ).stdout
    names = re.findall(r" [A-Z] (\S+)$", table, re.MULTILINE)
    foreign = [name for name in names if not name.startswith("eb_") and name != "RegisterCustomOps"]
    assert not foreign
    assert "eb_paged_attention_run" in names
    KernelLibrary()
