"""A Ray cluster of several nodes on this machine, in a network of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STORE = 200 * 2**20  # bytes of a node's object store
# Outside of a network namespace with nothing but loopback, Ray takes 127.0.0.1 for the machine's outer address, and
# hangs where that does not lead back.
ALONE = 'ip link set lo up && exec "$@"'


def in_own_network(
    command: Sequence[str], seconds: float, capture: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a command where there is no network but loopback; what it leaves running ends with it."""
    flags = ["-n" if os.geteuid() == 0 else "-rn", "-p", "-f", "--kill-child", "--mount-proc"]
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        # actors find what lies beside this file
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
    }
    # a dead node is noticed after 2 s, not 20
    quick = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
    return subprocess.run(
        ["unshare", *flags, "sh", "-c", ALONE, "sh", *command],
        env={**os.environ, **quiet, **quick},
        timeout=seconds,
        capture_output=capture,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """A cluster with one node per number, the first being the head; all are ended."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cpus[0], "include_dashboard": False, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for count in cpus[1:]:
            add_node(made, count)
        made.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = made.address
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def add_node(made: Any, cpus: int = 1) -> Any:
    return made.add_node(num_cpus=cpus, object_store_memory=STORE)


def kill_node(node: Any, by: signal.Signals = signal.SIGKILL) -> None:
    """Kill a node's raylet and its workers at once, as a machine ends; left alone they would work on for a while.

    By SIGSTOP it is as if cut off: it closes nothing, and says nothing any more.
    """
    raylet = node.all_processes["raylet"][0].process.pid
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    for process in (raylet, *map(int, workers)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, by)
