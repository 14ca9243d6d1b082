"""The wheel and the sdist: what is in them, and that they run where they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import afield

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src"


def run(*command: str | Path, cwd: Path) -> str:
    """A command's output; what leads Python to this source tree is left out of its environment."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = set(wheel.namelist())
        info = f"afield-{afield.__version__}.dist-info"
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        metadata = wheel.read(f"{info}/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"afield", info}
    sources = {str(path.relative_to(SOURCES)) for path in (SOURCES / "afield").rglob("*.*")}
    kept = {name for name in sources if "__pycache__" not in name}
    assert {name for name in names if name.startswith("afield/")} == kept
    assert "afield/py.typed" in names
    assert "afield/experiments/presets/default.toml" in names
    assert f"{info}/licenses/LICENSE" in names
    assert "afield = afield.cli:main" in entry_points
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra" not in line
    ]
    assert len(wanted) == len(project["dependencies"])


def test_the_sdist_holds_what_a_developer_needs(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for needed in ("pyproject.toml", "README.md", "LICENSE", "tests/test_package.py", "examples/one_file.py"):
        assert needed in names
    assert "src/afield/experiments/presets/default.toml" in names
    unwanted = ("__pycache__", ".venv", ".git/", "_cache", "runs/", ".hypothesis")
    assert [name for name in names if any(part in name for part in unwanted)] == []


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_it_runs_where_it_is_installed(built: Path, tmp_path: Path, pattern: str) -> None:
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=tmp_path)
    python, command = home / "bin" / "python", home / "bin" / "afield"
    # Dependencies come from this environment; of afield it has no more than a pointer that is not followed there.
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation", "--quiet")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", *options, only(built, pattern), cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path) == f"afield {afield.__version__}\n"
    program = (
        "import sys, afield, afield.cli; print(afield.__file__)\n"
        "sys.argv = ['afield', 'run', '--strategy', 'fedasync', '--set', 'stop.updates=3']\n"
        "afield.cli.main()"
    )
    lines = run(python, "-c", program, cwd=tmp_path).splitlines()
    assert Path(lines[0]).is_relative_to(site)
    assert any(line.startswith("fedasync") for line in lines)
    assert (tmp_path / "runs" / "default-001" / "model.safetensors").is_file()
