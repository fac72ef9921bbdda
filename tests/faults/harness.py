"""Runs of every mode, to be disturbed: how they are started, who is in them, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import psutil

ROOT = Path(__file__).parent.parent.parent
SITE = Path(__file__).parent / "site"
NUM_ENVS, N_STEPS, EPISODE = 16, 32, 9  # Catch: every episode takes nine steps
MARK = "RLCB_TEST_RUN"
SIZES = (
    "--env", "Catch-v0", "--num-envs", NUM_ENVS, "--batch-size", 128, "--num-threads", 1,
    "--set", f"training.n_steps={N_STEPS}", "--set", "training.log_interval=1", "--set", "training.save_interval=3",
    "--set", "training.n_epochs=2", "--set", "parallel.pin=never", "--set", "impala.num_learners=1",
)  # fmt: skip
WORKERS = ("--num-workers", 2, "--num-envs-per-worker", NUM_ENVS // 2)
NODES = (
    "--workers-per-node", 1, "--set", "cluster.timeout=40", "--set", "cluster.max_restarts=0",
    "--set", "cluster.join_timeout=40", "--set", "parallel.num_envs_per_worker=null",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    algorithm: str
    mode: str

    @property
    def label(self) -> str:
        return f"{self.algorithm.upper()}_{self.mode.capitalize()}"

    @property
    def name(self) -> str:
        return f"{self.algorithm} {self.mode}"

    def call(self, output: Path, timesteps: int, *more: object) -> list[str]:
        train = ["train", "--algorithm", self.algorithm, *SIZES, "--total-timesteps", timesteps, "--output-dir", output]
        if self.mode == "distributed":
            train = ["launch", "local", "--nodes", 2, "--", *train, *NODES]
        else:
            train += ["--mode", self.mode, *(WORKERS if self.mode == "parallel" else ())]
        return [sys.executable, "-m", "rl_cluster_benchmark", *map(str, [*train, *more])]


MODES = [
    Mode("ppo", "sequential"),
    Mode("ppo", "parallel"),
    Mode("a2c", "parallel"),
    Mode("a3c", "parallel"),
    Mode("impala", "parallel"),
    Mode("ppo", "distributed"),
    Mode("a3c", "distributed"),
    Mode("impala", "distributed"),
]


class Terminal:
    """A terminal with an interactive shell in it; what the terminal shows is added to a file."""

    def __init__(self, environ: dict[str, str], shown: Path) -> None:
        self._master, slave = os.openpty()
        self.shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--noprofile", "--norc", "-i"],
            cwd=ROOT, env=environ | {"PS1": "$ ", "HISTFILE": ""}, stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        self._is_closing = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(shown,), daemon=True)
        self._reader.start()

    def type(self, command: str) -> None:
        os.write(self._master, command.encode() + b"\n")

    def close(self) -> None:
        """Close the window: the kernel hangs up on the shell, and the shell on what it has started."""
        if not self._is_closing.is_set():
            self._is_closing.set()
            self._reader.join()
            os.close(self._master)

    def _read(self, shown: Path) -> None:
        os.set_blocking(self._master, False)
        with open(shown, "ab") as file, contextlib.suppress(OSError):
            while not self._is_closing.wait(0.02):
                with contextlib.suppress(BlockingIOError):
                    while content := os.read(self._master, 65_536):
                        file.write(content)
                        file.flush()


@dataclass
class Faulty:
    """A run in the background, with a temporary folder of its own; use it as a context manager."""

    mode: Mode
    output: Path
    timesteps: int = 1_000_000_000
    more: tuple[object, ...] = ("--resume-if-present",)
    environ: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # a command that starts the run: prlimit, unshare
    place: Literal["", "terminal", "nohup"] = ""  # started by hand in a terminal, or there with nohup and &

    live: ClassVar[list[Faulty]] = []

    def __enter__(self) -> Faulty:
        self.id = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="rlcb-fault-"))  # empty afterwards, or something was left
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.text_file, self._status_file = Path(f"{self.temporary}.log"), Path(f"{self.temporary}.status")
        self.text_file.touch()
        self.shm_before = set(os.listdir("/dev/shm"))
        modules = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, modules)), "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.temporary), MARK: self.id,
        }  # fmt: skip
        environ |= self.environ
        call = [*self.prefix, *self.mode.call(self.output, self.timesteps, *self.more)]
        if self.place:
            self.terminal = Terminal(environ, self.text_file)
            self.terminal.type(self._by_hand(call))
            self.process = self.terminal.shell
        else:
            with open(self.text_file, "wb") as file:
                self.process = subprocess.Popen(
                    call, cwd=ROOT, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
        self.live.append(self)
        return self

    def _by_hand(self, call: Sequence[str]) -> str:
        """The command line that starts it; a shell that survives the terminal writes down how it ended."""
        run = shlex.join(call)
        if self.place == "nohup":
            run = f"nohup {run} > {self.text_file} 2>&1 < /dev/null"
        # A signal that is caught by a shell has its default meaning again in what the shell starts.
        survivor = (
            f"trap : HUP; {run}; echo $? > {self._status_file}.new; mv {self._status_file}.new {self._status_file}"
        )
        return shlex.join(["bash", "-c", survivor]) + (" &" if self.place == "nohup" else "")

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.live.remove(self)
        self.process.wait(timeout=30)
        if self.place:
            self.terminal.close()
        subprocess.run(["rm", "-rf", self.temporary, self.text_file, self._status_file], check=False)

    def kill(self) -> None:
        for process in self.everyone():
            with contextlib.suppress(psutil.Error):
                process.kill()

    @property
    def text(self) -> str:
        return self.text_file.read_text(errors="replace")

    def everyone(self) -> list[psutil.Process]:
        """All processes of the run, found by a mark in their environment: parents may be gone."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.id and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def own(self) -> psutil.Process | None:
        """The process that was asked for: the run's, or the launcher's; None before the terminal has started it."""
        if not self.place:
            return psutil.Process(self.process.pid)
        ours = {p.pid: p for p in self.everyone() if "rl_cluster_benchmark" in p.cmdline() and "-c" not in p.cmdline()}
        return next((p for p in ours.values() if p.ppid() not in ours), None)

    def mains(self) -> list[psutil.Process]:
        """The process of the run, or of each of its nodes."""
        own = self.own()
        if own is None:
            return []
        return [p for p in own.children() if "train" in p.cmdline()] if self.mode.mode == "distributed" else [own]

    def servers(self) -> list[psutil.Process]:
        return [c for main in self.mains() for c in main.children() if "multiprocessing.forkserver" in _command(c)]

    def workers(self) -> list[list[psutil.Process]]:
        """Of each node, in the order of their ranks; IMPALA's learner, of which there is one here, is the first."""
        return [sorted(server.children(), key=lambda worker: worker.create_time()) for server in self.servers()]

    def log(self) -> Path:
        return self.output / "logs" / self.mode.label / "metrics.jsonl"

    def num_lines(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.log().read_bytes().count(b"\n")
        return 0

    def wait_for_updates(self, more: int = 1, seconds: float = 90) -> None:
        """Until so many updates are in the log that were not there when it began this time."""
        deadline = time.monotonic() + seconds
        while "Resumed from" not in self.text and "starting at the beginning" not in self.text:
            self._still_going(deadline)
        before = None
        while True:
            # A resumed run rewrites the log without what it is about to do again, then appends.
            lines = self.num_lines()
            before = lines if before is None or lines < before else before
            if lines >= before + more:
                return
            self._still_going(deadline)

    def wait_for_text(self, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.text:
            self._still_going(deadline)

    def _still_going(self, deadline: float) -> None:
        assert self.status() is None, f"ended with {self.status()}:\n{self.text}"
        assert time.monotonic() < deadline, f"no progress:\n{self.text}"
        time.sleep(0.02)

    def status(self) -> int | None:
        """How the run ended; None while it goes on."""
        if not self.place:
            return self.process.poll()
        return int(self._status_file.read_text()) if self._status_file.exists() else None

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (status := self.status()) is None:
            assert time.monotonic() < deadline, f"it did not end within {seconds} s:\n{self.text}"
            time.sleep(0.02)
        return status

    def leftovers(self) -> list[str]:
        """What is still there of a run that has ended: processes, shared memory, temporary files."""
        patience = (
            60.0 if self.mode.mode == "distributed" else 10.0
        )  # a node that is alone now notices in cluster.timeout
        deadline = time.monotonic() + patience
        while True:
            found = [f"process {p.pid}: {_command(p)}" for p in self.everyone()]
            found += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shm_before - _in_use_in_shm()]
            found += [f"temporary {file}" for file in self.temporary.rglob("*")]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def signal_group(self, number: int) -> None:
        for process in self.everyone() if self.mode.mode == "distributed" else ():
            with contextlib.suppress(psutil.Error):  # its nodes have groups of their own
                process.send_signal(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _in_use_in_shm() -> set[str]:
    """By whatever else runs on this machine: the processes of the run are gone."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text().splitlines()
            names |= {line.rpartition("/dev/shm/")[2].strip() for line in lines if "/dev/shm/" in line}
    return names


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
