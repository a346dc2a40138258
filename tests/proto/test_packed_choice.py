"""Which implementation of `packed` a process uses, and what it says when it has no choice."""

import json
from pathlib import Path

import pytest

from draftfeed_proto.codecs import packed_native
from draftfeed_proto.codecs.packed import NAMES, VARIABLE, Packed, available
from draftfeed_proto.errors import UnavailableISA


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the build would have put one."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(packed_native, "_LIBRARY", tmp_path / "_packed.so")
    monkeypatch.setattr(packed_native, "_REPORT", tmp_path / "_build.json")
    return tmp_path


def test_the_fastest_that_the_machine_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    able = list(available().implementations)
    assert able == [name for name in NAMES if name in able]
    assert Packed().implementation == able[0]


@pytest.mark.parametrize("forced", available().implementations)
def test_the_environment_forces_an_implementation(
    forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, forced)
    assert Packed().implementation == forced


def test_an_empty_variable_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert Packed().implementation == next(iter(available().implementations))


def test_a_name_that_is_none_is_told_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "AVX512")
    with pytest.raises(UnavailableISA, match=r"is 'AVX512', which is unknown; it may be .*numpy"):
        _ = Packed().implementation


def test_without_a_library_numpy_does_it_and_the_builds_reason_is_known(no_library: Path) -> None:
    reason = {"native": False, "reason": "cc -std=c11 failed:\npacked.c:1: error: no such luck"}
    (no_library / "_build.json").write_text(json.dumps(reason))
    assert Packed().implementation == "numpy"
    assert available().lacking == "cc -std=c11 failed:"


def test_a_forced_isa_that_cannot_be_is_one_line_with_the_reason(
    no_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_library / "_build.json").write_text('{"native": false, "reason": "there is no C compiler"}')
    monkeypatch.setenv(VARIABLE, "avx2")
    with pytest.raises(UnavailableISA) as caught:
        _ = Packed().implementation
    assert "'avx2', which this machine cannot run; it may be numpy here" in str(caught.value)
    assert "there is no C compiler" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_service_says_at_its_start_that_its_codec_is_slow(
    no_library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (no_library / "_build.json").write_text('{"native": false, "reason": "there is no C compiler"}')
    Packed().prepare()
    (warning,) = caplog.messages
    assert "NumPy" in warning
    assert "there is no C compiler" in warning
    caplog.clear()
    monkeypatch.setenv(VARIABLE, "numpy")  # whoever forces it knows
    Packed().prepare()
    assert not caplog.messages


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library"])
def test_a_library_that_cannot_be_loaded_is_none(no_library: Path, content: bytes) -> None:
    """One of another machine, or cut short by a full disk."""
    (no_library / "_packed.so").write_bytes(content)
    assert Packed().implementation == "numpy"
    assert str(no_library / "_packed.so") in available().lacking
