"""A SLURM cluster of three nodes on this machine: munged, slurmctld and three slurmd, in a directory of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

import psutil

CONFIG = """\
ClusterName=rlcb
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
KillWait=15
MinJobAge=600
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-3] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=4000
PartitionName=low Nodes=node[1-3] Default=YES PriorityTier=1 GraceTime=20 State=UP
PartitionName=high Nodes=node[1-3] PriorityTier=10 PreemptMode=OFF State=UP
"""


class SlurmCluster:
    def __init__(self, home: Path, processes) -> None:
        self.home, self._processes = home, processes
        self.environ = {"SLURM_CONF": str(home / "slurm.conf")}
        self.nodes: dict[str, subprocess.Popen] = {}
        home.chmod(0o755)
        for name in ("munge", "state"):
            (home / name).mkdir()
        ports = _free_ports(4)
        (home / "slurm.conf").write_text(
            CONFIG.format(name=socket.gethostname(), home=home, controller=ports[0], first=ports[1], last=ports[3])
        )
        self._start_munge()
        self._start("slurmctld", "-D", "-i")
        for number in (1, 2, 3):
            self.start_node(f"node{number}")

    def start_node(self, name: str) -> None:
        self.nodes[name] = self._start("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Its daemon, and whatever runs there together with the daemons of these steps."""
        self.nodes[name].kill()
        self.nodes[name].wait()
        there = [process for process in psutil.process_iter() if self._runs_on(process, name)]
        steps = {parent for process in there if (parent := process.parent()) and parent.name() == "slurmstepd"}
        for process in (*steps, *there):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _runs_on(self, process: psutil.Process, name: str) -> bool:
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            ours = environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
            return ours and environ.get("SLURMD_NODENAME") == name
        return False

    def ask(self, *call: object) -> str:
        done = subprocess.run(
            list(map(str, call)), env=os.environ | self.environ, capture_output=True, text=True, timeout=30
        )
        return done.stdout.strip()

    def ready(self) -> bool:
        return self.ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == "3"

    def _start(self, program: str, *words: str) -> subprocess.Popen:
        log = self.home / f"{program}{words[-1]}.out"
        return self._processes.start([f"/usr/sbin/{program}", *words], log, **self.environ)

    def _start_munge(self) -> None:
        home = self.home / "munge"
        (home / "key").write_bytes(secrets.token_bytes(128))
        (home / "key").chmod(0o400)
        for path in (home, home / "key"):
            shutil.chown(path, "munge", "munge")
        home.chmod(0o755)
        call = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "/usr/sbin/munged", "--foreground"]
        call += [
            f"--socket={home}/socket",
            f"--key-file={home}/key",
            f"--pid-file={home}/pid",
            f"--seed-file={home}/seed",
        ]
        self._processes.start([*call, f"--log-file={home}/log", "--force"], self.home / "munged.out")


def _free_ports(count: int) -> list[int]:
    """Neighbours: SLURM wants a range."""
    for first in range(17_000, 18_000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", first + offset))
            return [first + offset for offset in range(count)]
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
    raise RuntimeError("no free ports")
