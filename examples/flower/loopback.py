"""A whole Flower federation on this machine's loopback: started here, stopped here, process by process.

python loopback.py simulation            # SuperLink with simulated nodes
python loopback.py deployment --nodes 3  # SuperLink and SuperNodes, as on as many machines
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Federation:
    """A SuperLink and its SuperNodes, for the length of a `with`. Logs and Flower's own files go to `folder`."""

    def __init__(self, folder: Path, nodes: int = 3, simulated: bool = False) -> None:
        self.folder, self.nodes, self.simulated = folder, nodes, simulated
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen] = {}
        self.env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",  # Flower starts its own programs by name
            "FLWR_HOME": str(folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": "local",  # a Ray of its own, not one that happens to run here
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> "Federation":
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        lines = ["[superlink]", 'default = "here"', "[superlink.here]"]
        lines += [f'address = "127.0.0.1:{self.port}"', "insecure = true"]
        (home / "config.toml").write_text("\n".join(lines))
        options = ["--simulation"] if self.simulated else []
        address = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        # without this option Flower installs what an app asks for, at run time, from the network
        options += ["--disable-runtime-dependency-installation"]
        try:
            self._start("superlink", ["flower-superlink", *address, *options])
            self._wait()
            for number in range(0 if self.simulated else self.nodes):
                self.start_node(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_node(self, partition: int, name: str = "") -> str:
        """One more SuperNode, with that part of the data."""
        name = name or f"node-{partition}"
        config = f"partition-id={partition} num-partitions={self.nodes}"
        address = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())]
        self._start(name, ["flower-supernode", *address, "--node-config", config])
        return name

    def run(self, app: Path = HERE, timeout: float = 300.0, **config: object) -> str:
        """`flwr run`, to its end; gives what it printed."""
        with self.begin(app, **config) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return output

    def begin(self, app: Path = HERE, **config: object) -> subprocess.Popen:
        """`flwr run` in a process of its own, whose output is the run's log."""
        pairs = [f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items()]
        command = ["flwr", "run", str(app), "here", "--stream"]
        command += ["--run-config", " ".join(pairs)] if pairs else []
        if self.simulated:
            command += ["--federation-config", f"num-supernodes={self.nodes} client-resources-num-cpus=1"]
        command[0] = str(BIN / command[0])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=self.env, cwd=self.folder, **pipes)

    def stop(self) -> None:
        """Ask everyone to end, the SuperLink last; who does not is killed."""
        for name in reversed(self.processes):
            self.processes[name].send_signal(signal.SIGTERM)
            try:
                self.processes[name].wait(15)
            except subprocess.TimeoutExpired:
                self.kill(name)
        self.processes.clear()

    def kill(self, name: str) -> None:
        """End one process, and those that it started, at once."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _start(self, name: str, command: list[str]) -> None:
        command[0] = str(BIN / command[0])
        with open(self.folder / f"{name}.log", "w") as out:
            self.processes[name] = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self) -> None:
        """Until the SuperLink answers."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if self.processes["superlink"].poll() is not None:
                raise RuntimeError("the SuperLink ended: " + self.log("superlink")[-2000:])
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError("the SuperLink does not answer: " + self.log("superlink")[-2000:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("simulation", "deployment"))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--strategy", default="mr-asyncfl")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave the `with`: nothing goes on running
    with (
        tempfile.TemporaryDirectory() as folder,
        Federation(Path(folder), chosen.nodes, chosen.kind == "simulation") as federation,
    ):
        settings = {"strategy": chosen.strategy, "num_server_rounds": chosen.rounds}
        print(federation.run(**settings, min_nodes=chosen.nodes))
