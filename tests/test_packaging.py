"""The repository's root is the package `stackrl`: nothing is left out of it, and the set-up is sound."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile

import pytest

import stacks

PROJECT = tomllib.loads((stacks.ROOT / "pyproject.toml").read_text())
CODE = ("schemas", "runtime")


def installer():
    spec = importlib.util.spec_from_file_location("install", stacks.ROOT / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def folders_with_code():
    found = {"stackrl"}
    for top in CODE:
        for file in (stacks.ROOT / top).rglob("*.py"):
            found.add(".".join(["stackrl", *file.parent.relative_to(stacks.ROOT).parts]))
    return found


def test_the_package_list_is_the_folders():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders_with_code()


def test_every_package_has_an_init():
    for package in folders_with_code():
        folder = stacks.ROOT.joinpath(*package.split(".")[1:])
        assert (folder / "__init__.py").exists(), folder


def test_no_code_imports_by_another_name():
    """`import runtime` would load everything a second time."""
    for top in CODE:
        for file in (stacks.ROOT / top).rglob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]) and len(words) > 1:
                    assert words[1].split(".")[0] not in CODE, f"{file}: {line}"


@pytest.mark.slow
def test_a_wheel_holds_code_and_data(tmp_path):
    pytest.importorskip("setuptools")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=stacks.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in files:
        source = stacks.ROOT / name
        if name and source.is_file():
            target = tmp_path / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    build = "import setuptools.build_meta as b; b.build_wheel('../wheel')"
    (tmp_path / "wheel").mkdir()
    subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "source", check=True, capture_output=True, timeout=120
    )
    (wheel,) = (tmp_path / "wheel").glob("stackrl-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"stackrl/{folder}/{file.name}"
        for folder in ("stacks", "templates")
        for file in (stacks.ROOT / folder).glob("*.yaml")
    }
    wanted |= {"stackrl/cli.py", "stackrl/runtime/node.py", "stackrl/schemas/skypilot.schema.json"}
    assert wanted <= held
    assert not [name for name in held if name.startswith(("stackrl/tests", "tests"))]


def test_the_installer_passes_on_what_pip_is_told(tmp_path):
    install = installer()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"torch-{install.TORCH}+cpu-{python}-{python}-linux_x86_64.whl").touch()
    told = {
        "find-links": [str(tmp_path), "https://example.invalid/wheels"],
        "index-url": ["https://example.invalid/simple"],
    }
    assert install._sources(told) == [
        "--find-links", str(tmp_path), "--find-links", "https://example.invalid/wheels",
        "--default-index", "https://example.invalid/simple",
    ]  # fmt: skip
    assert install._sources({"find-links": [tmp_path.as_uri()]}) == ["--find-links", tmp_path.as_uri()]
    assert install._sources({"find-links": ["/nowhere"]})[-2:] == ["--torch-backend", "cpu"]
    assert install._sources({}) == ["--torch-backend", "cpu"]


@pytest.mark.slow
def test_the_installer_reads_pips_own_configuration(tmp_path, monkeypatch):
    install = installer()
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nfind-links = /a\n  /b\nextra-index-url = https://example.invalid/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    told = install._pip_configuration(sys.executable)
    assert told["find-links"][-2:] == ["/a", "/b"]
    assert told["extra-index-url"] == ["https://example.invalid/simple"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/c")
    assert install._pip_configuration(sys.executable)["find-links"] == ["/c"]


def test_a_silent_extra_index_is_left_out(monkeypatch, capsys):
    import socket

    install = installer()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(install, "INDEX_LIMIT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        assert install._sources({"extra-index-url": [index]}) == ["--torch-backend", "cpu"]
    assert "does not answer" in capsys.readouterr().err


def test_the_installer_asks_for_what_the_project_pins():
    install = installer()
    cpu = PROJECT["project"]["optional-dependencies"]["cpu"]
    assert f"torch=={install.TORCH}" in cpu
    assert "smollm2" in PROJECT["project"]["optional-dependencies"]


def test_no_lock_file_and_no_host_in_the_set_up():
    for name in ("pyproject.toml", "install.py", "Makefile", ".ci/run"):
        text = (stacks.ROOT / name).read_text()
        assert "://" not in text.replace("http://", "", 1).replace("https://", "", 1), name
    assert not (stacks.ROOT / "uv.lock").exists()
