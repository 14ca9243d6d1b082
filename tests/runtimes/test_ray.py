"""Ray: the checks of inside_ray.py, on a cluster of two nodes in a network of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import in_own_network

from afield.core.errors import InputError
from afield.experiments.config import Runtime

HERE = Path(__file__).parent


@pytest.mark.slow
def test_on_a_cluster_of_two_nodes() -> None:
    """In a process of its own: the network of a process cannot be changed back."""
    checks = HERE / "inside_ray.py"
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--durations=0", str(checks)]
    done = in_own_network(command, seconds=400)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_settings_that_no_cluster_has() -> None:
    for wrong in ({"name": "rey"}, {"cpus": 0}, {"actors": 0}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} = "):
            Runtime(**wrong)  # type: ignore[arg-type]


def test_without_ray_there_is_a_remedy() -> None:
    """And nothing else needs it: the import of everything that `afield run` uses goes without."""
    text = (
        "import sys; sys.modules['ray'] = None\n"
        "import afield.cli.run\n"
        "from afield.runtimes.ray import connected\n"
        "try: connected('auto')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert told.stdout == "InputError Ray is not installed: pip install 'afield[ray]'\n"
