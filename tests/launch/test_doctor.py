"""The doctor finds what is missing and says how to mend it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stackrl.runtime.launch import doctor


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the imports of torch and vllm, which take long."""
    slow = {doctor._torch, doctor._vllm}
    monkeypatch.setattr(doctor, "_CHECKS", [check for check in doctor._CHECKS if check not in slow])
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))


def test_a_ready_machine(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.doctor("json")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert {"python", "cores", "memory", "ports", "runs", "disk", "gpus", "skypilot"} <= checks.keys()
    assert all(check["mend"] for check in checks.values() if not check["fine"])
    missing = [check for check in checks.values() if not check["fine"] and not check["optional"]]
    assert code == (1 if missing else 0)


def test_what_is_missing_comes_with_its_mend(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", [lambda: doctor._importable("torch", "import no_such_module")])
    assert doctor.doctor("text") == 1
    out, err = capsys.readouterr()
    assert "MISSING" in out and "no_such_module" in out and "make install" in out
    assert "not ready" in err


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "file" / "home"))
    check = doctor._folder()
    assert not check.fine and "STACKRL_HOME" in check.mend
