"""A Ray cluster of several nodes on this machine, in a network of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Outside of a network namespace with nothing but loopback, Ray takes 127.0.0.1 for the machine's outer address, and
# hangs where that does not lead back.
ALONE = 'ip link set lo up && exec "$@"'


def in_own_network(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command where there is no network but loopback."""
    flag = "-n" if os.geteuid() == 0 else "-rn"
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
    # a dead node is noticed after 2 s, not 20
    quick = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
    return subprocess.run(
        ["unshare", flag, "sh", "-c", ALONE, "sh", *command],
        env={**os.environ, **quiet, **quick},
        timeout=seconds,
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def nodes(*cpus: int) -> Iterator[list[Any]]:
    """A cluster with one node per number, the first being the head; gives the nodes, and ends them all."""
    from ray.cluster_utils import Cluster

    settings = {"include_dashboard": False, "object_store_memory": 200 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **settings})
    try:
        others = [made.add_node(num_cpus=count, object_store_memory=200 * 2**20) for count in cpus[1:]]
        made.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = made.address
        yield [made.head_node, *others]
    finally:
        import ray

        ray.shutdown()
        made.shutdown()


def kill_node(node: Any) -> None:
    """Kill a node's raylet, as if its machine had lost power."""
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)


if __name__ == "__main__":
    # python tests/cluster.py COMMAND...: for a look around by hand
    with nodes(1, 1):
        sys.exit(subprocess.call(sys.argv[1:]))
