"""Wheels and editable installs, made by the real tools from copies of the tree."""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODECS = "draftfeed_proto/codecs"
IN_PLACE = Path("proto", CODECS)
LIBRARY = "_packed.so"
REPORT = "_build.json"
NATIVE = {"native": True, "reason": ""}
# Compiles in a moment; its answer shows what it was compiled with.
STAND_IN = """
#ifndef ISAS
#define ISAS 1
#endif
__attribute__((visibility("default"))) unsigned draftfeed_isas(void) { return ISAS; }
"""

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what packaging reads, in a folder with a space in its name."""
    tree = tmp_path / "a tree"
    tree.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    built = shutil.ignore_patterns("__pycache__", f"{LIBRARY}*", REPORT)
    for room in ("proto", "producer", "consumer", "deploy"):
        package = f"{room}/draftfeed_{room}"
        shutil.copytree(ROOT / package, tree / package, ignore=built)
    return tree


@pytest.fixture
def small(tree: Path) -> Path:
    """The same with a stand-in for the C."""
    sources = tree / IN_PLACE / "native"
    shutil.rmtree(sources)
    sources.mkdir()
    sources.joinpath("packed.c").write_text(STAND_IN)
    return tree


Done = subprocess.CompletedProcess[str]


def python(cwd: Path, *arguments: str | Path, **variables: str) -> Done:
    ours = ("CC", "CFLAGS", "DRAFTFEED_PURE", "DRAFTFEED_REQUIRE_NATIVE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, *arguments]
    environment |= variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def pip_wheel(source: Path, **variables: str) -> Path:
    """A wheel as pip builds it, but with what is installed here instead of fetched."""
    out = source.parent / "wheels"
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    done = python(source.parent, "-m", "pip", "wheel", *offline, "-w", out, source, **variables)
    assert done.returncode == 0, done.stderr
    [wheel] = out.iterdir()
    return wheel


def hatchling(tree: Path, target: str, *arguments: str, **variables: str) -> Done:
    return python(tree, "-m", "hatchling", "build", "-t", target, *arguments, **variables)


def compile_in_place(tree: Path, **variables: str) -> Done:
    return python(tree, "hatch_build.py", **variables)


def report_in(tree: Path) -> dict[str, object]:
    return json.loads(tree.joinpath(IN_PLACE, REPORT).read_text())


def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / CODECS


def isas(library: Path) -> int:
    return ctypes.CDLL(str(library)).draftfeed_isas()


@needs_compiler
def test_a_wheel_installs_with_a_library_that_loads(tree: Path, tmp_path: Path) -> None:
    wheel = pip_wheel(tree)
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    target = tmp_path / "installed"
    done = python(tmp_path, "-m", "pip", "install", "--no-deps", "-t", target, wheel)
    assert done.returncode == 0, done.stderr
    codecs = target / CODECS
    assert json.loads(codecs.joinpath(REPORT).read_text()) == NATIVE
    assert isas(codecs / LIBRARY) & 1, "portable C runs on every CPU"
    assert not list(codecs.rglob("*.[ch]"))


def test_without_a_compiler_the_wheel_is_pure_and_says_why(small: Path) -> None:
    """And does not take along the library that an editable install once left in the tree."""
    small.joinpath(IN_PLACE, LIBRARY).write_bytes(b"of another time")
    wheel = pip_wheel(small, PATH="/nowhere")
    assert wheel.name.endswith("-py3-none-any.whl")
    codecs = unpacked(wheel)
    report = json.loads(codecs.joinpath(REPORT).read_text())
    assert report == {"native": False, "reason": "there is no C compiler (cc, gcc or clang)"}
    assert not codecs.joinpath(LIBRARY).exists()
    assert small.joinpath(IN_PLACE, LIBRARY).exists(), "a wheel leaves the tree as it was"


@needs_compiler
def test_an_sdist_has_all_that_a_wheel_is_built_from(small: Path) -> None:
    out = small.parent / "sdist"
    assert compile_in_place(small).returncode == 0
    done = hatchling(small, "sdist", "-d", str(out))
    assert done.returncode == 0, done.stderr
    [sdist] = out.iterdir()
    shutil.unpack_archive(sdist, small.parent, filter="data")
    [source] = small.parent.glob("draftfeed-*")
    assert not list(source.rglob(LIBRARY))
    done = hatchling(source, "wheel")
    assert done.returncode == 0, done.stderr
    [wheel] = source.glob("dist/*.whl")
    assert isas(unpacked(wheel) / LIBRARY) == 1


@needs_compiler
def test_an_editable_install_compiles_in_place(small: Path) -> None:
    done = hatchling(small, "wheel:editable", "--hooks-only")
    assert done.returncode == 0, done.stderr
    assert report_in(small) == NATIVE
    assert isas(small / IN_PLACE / LIBRARY) == 1


@needs_compiler
def test_compiler_and_flags_are_the_users(small: Path) -> None:
    done = compile_in_place(small, CC="cc -DISAS=(ONE|TWO)", CFLAGS="-DONE=1 -DTWO='( 2 )'")
    assert done.returncode == 0, done.stderr
    assert isas(small / IN_PLACE / LIBRARY) == 3


@needs_compiler
def test_what_cannot_be_compiled_says_why_and_leaves_no_old_library(small: Path) -> None:
    assert compile_in_place(small).returncode == 0
    small.joinpath(IN_PLACE, "native", "packed.c").write_text("#error such a thing")
    done = compile_in_place(small)
    assert done.returncode == 0
    assert "error such a thing" in done.stderr
    report = report_in(small)
    assert report["native"] is False
    assert "error such a thing" in str(report["reason"])
    assert sorted(path.name for path in small.joinpath(IN_PLACE).glob("_*")) == [
        "__init__.py",
        REPORT,
    ]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CC": "no-such-compiler -m64"}, "no-such-compiler cannot be run: No such file"),
        ({"DRAFTFEED_PURE": "1"}, "DRAFTFEED_PURE=1 was set"),
    ],
)
def test_whoever_requires_the_library_gets_no_install_without(
    small: Path, variables: dict[str, str], reason: str
) -> None:
    assert compile_in_place(small, **variables).returncode == 0
    assert str(report_in(small)["reason"]).startswith(reason)
    required = variables | {"DRAFTFEED_REQUIRE_NATIVE": "1"}
    for done in (compile_in_place(small, **required), hatchling(small, "wheel", **required)):
        assert done.returncode != 0
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(small.rglob("*.whl"))


def test_elsewhere_than_on_linux_there_is_no_library(small: Path) -> None:
    elsewhere = "import runpy, sys; sys.platform = 'darwin'; "
    done = python(small, "-c", elsewhere + "runpy.run_path('hatch_build.py', {}, '__main__')")
    assert done.returncode == 0, done.stderr
    assert report_in(small) == {"native": False, "reason": "its C is for Linux, this is darwin"}


@needs_compiler
def test_a_library_in_use_is_not_written_over(small: Path) -> None:
    """It is mapped: whoever runs its code would crash."""
    library = small / IN_PLACE / LIBRARY
    assert compile_in_place(small).returncode == 0
    before = library.read_bytes()
    with library.open("rb") as in_use:
        assert compile_in_place(small, CFLAGS="-DISAS=7").returncode == 0
        assert in_use.read() == before
    assert library.read_bytes() != before


@needs_compiler
def test_two_environments_build_the_same_library(small: Path, tmp_path: Path) -> None:
    """They share a tree. Nor does it matter where that lies."""
    other = tmp_path / "elsewhere"
    shutil.copytree(small, other)
    for folder in (small, other):
        assert compile_in_place(folder).returncode == 0
    first, second = (folder.joinpath(IN_PLACE, LIBRARY).read_bytes() for folder in (small, other))
    assert first == second


@needs_compiler
def test_make_compiles_when_a_source_has_changed_and_only_then(small: Path) -> None:
    shutil.copy(ROOT / "Makefile", small)
    source, library = small / IN_PLACE / "native" / "packed.c", small / IN_PLACE / LIBRARY
    make = ["make", f"PYTHON={sys.executable}", str(IN_PLACE / REPORT)]
    subprocess.run(make, cwd=small, check=True)
    for age, path in (
        (20, source),
        (20, source.parent),
        (20, small / "hatch_build.py"),
        (10, small / IN_PLACE / REPORT),
        (10, library),
    ):
        then = path.stat().st_mtime - age
        os.utime(path, (then, then))
    before = library.stat().st_ino
    subprocess.run(make, cwd=small, check=True)
    assert library.stat().st_ino == before
    source.write_text(STAND_IN.replace("ISAS 1", "ISAS 2"))
    subprocess.run(make, cwd=small, check=True)
    assert isas(library) == 2


@needs_compiler
def test_the_library_of_this_tree_is_that_of_its_sources() -> None:
    """Else NumPy, or what was compiled before an edit, would pass the tests in its stead."""
    report = report_in(ROOT)
    if report["reason"] == "DRAFTFEED_PURE=1 was set":
        pytest.skip("built with DRAFTFEED_PURE=1")
    assert report == NATIVE
    built = ROOT.joinpath(IN_PLACE, REPORT).stat().st_mtime_ns
    sources = [ROOT / "hatch_build.py", *ROOT.joinpath(IN_PLACE, "native").glob("*.[ch]")]
    edited = [path.name for path in sources if path.stat().st_mtime_ns > built]
    assert not edited, "`make venv` compiles them"
