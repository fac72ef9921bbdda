"""Heartbeats: every node writes one to the store each second; the head reads those of all nodes, the others the head's.

A store that does not answer blocks its caller, so a thread with a connection of its own talks to it; the training only
looks at what the thread has heard, and when.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.processes import watchdog

SECONDS_BETWEEN_BEATS = 1.0
MISSED_BEATS = 3  # after which a node is suspected, once a connection has broken
SECONDS_TO_LEARN_A_REASON = 5.0
SECONDS_TO_TELL = 5.0
SECONDS_TO_SAY_GOODBYE = 15.0
FAILED = "failed"  # key of the first failure's reason


class Membership:
    """This node's heartbeat, and what it knows of the other nodes: alive, silent, failed or gone."""

    def __init__(self, connect: Callable[[timedelta], Any], rank: int, labels: Sequence[str], timeout: float) -> None:
        self.rank, self.labels, self.timeout = rank, labels, timeout
        self.memory = 0  # bytes that this node uses, told to the others
        self._others = list(range(1, len(labels))) if rank == 0 else [0]
        self._beats: dict[int, str] = {}
        self._memory_of: dict[int, int] = {}
        self._looked_at = self._awake_since = time.monotonic()
        self._heard_at = dict.fromkeys(self._others, self._looked_at)
        self._left: set[int] = set()
        self._failure: tuple[int, str] | None = None
        self._leaving = threading.Event()
        self._store = connect(timedelta(seconds=timeout))
        self._thread = threading.Thread(target=self._talk, name="rlcb-membership", daemon=True)
        self._thread.start()

    def memory_elsewhere(self) -> int:
        return sum(self._memory_of.values())

    def check(self) -> None:
        """Raise when another node has failed, or has not been heard of for `timeout` seconds."""
        if self._failure is not None:
            raise TrainingFailedError(self._told_reason())
        for other, seconds in self._silences():
            if seconds > self.timeout:
                raise TrainingFailedError(
                    f"{self.labels[other]} has not been heard of for {seconds:.0f} s (cluster.timeout is "
                    f"{self.timeout:g}); the last checkpoint is intact, and --resume goes on from it."
                )

    def explain(self, error: TrainingFailedError) -> TrainingFailedError:
        """Return a better error than that of a broken connection: another node's reason, or who has fallen silent.

        Wait a few seconds for that; return the error itself if nothing is learned.
        """
        patience = min(self.timeout, SECONDS_TO_LEARN_A_REASON)
        if self.rank != 0:
            patience += MISSED_BEATS * SECONDS_BETWEEN_BEATS  # time for the head to find and report who is silent
        deadline = time.monotonic() + patience
        while self._now() < deadline:
            if self._failure is not None:
                return TrainingFailedError(self._told_reason())
            time.sleep(0.05)
        silent = [self.labels[n] for n, seconds in self._silences() if seconds > MISSED_BEATS * SECONDS_BETWEEN_BEATS]
        if silent:
            return TrainingFailedError(f"Lost contact with {' and '.join(silent)}. {error}")
        return error

    def report_failure(self, reason: str) -> None:
        """Tell the other nodes why this one stops; all report the first reason that any node has given."""

        def tell() -> None:
            self._store.compare_set(FAILED, "", json.dumps([self.rank, reason]))
            if self.rank == 0:  # the store ends with this process: leave the others time to read it
                time.sleep(2 * SECONDS_BETWEEN_BEATS)

        self._leave(tell, SECONDS_TO_TELL)

    def leave(self) -> None:
        """Say goodbye after a good end; the head, whose process holds the store, waits for all others to do so."""

        def wave() -> None:
            self._store.set(f"left/{self.rank}", "")
            while self.rank == 0 and self._others:
                if self._store.check([f"left/{other}" for other in self._others]):
                    break
                time.sleep(0.05)

        self._leave(wave, SECONDS_TO_SAY_GOODBYE)

    def _leave(self, last_words: Callable[[], None], seconds: float) -> None:
        """Stop the heartbeat and call `last_words`, for at most `seconds`, because a failed store never answers."""
        self._leaving.set()
        self._thread.join(timeout=2 * SECONDS_BETWEEN_BEATS)

        def speak() -> None:
            with contextlib.suppress(Exception):
                last_words()

        speaker = threading.Thread(target=speak, name="rlcb-last-words", daemon=True)
        speaker.start()
        speaker.join(timeout=seconds)

    def _told_reason(self) -> str:
        assert self._failure is not None
        rank, reason = self._failure
        return f"{self.labels[rank]} stopped: {reason}"

    def _silences(self) -> list[tuple[int, float]]:
        """Return (node, seconds since its last heartbeat), longest first, without nodes that ended in good order."""
        now = self._now()
        heard_at = {other: max(self._heard_at[other], self._awake_since) for other in self._others}
        silences = [(other, now - heard_at[other]) for other in self._others if other not in self._left]
        return sorted(silences, key=lambda item: -item[1])

    def _now(self) -> float:
        """Return the time. After a long pause since the last call it was this process that stood still."""
        now = time.monotonic()
        if now - self._looked_at > watchdog.OWN_PAUSE:
            self._awake_since = now  # from which silence counts
        self._looked_at = now
        return now

    def _talk(self) -> None:
        beat = 0
        while not self._leaving.is_set():
            try:
                beat += 1
                self._store.set(f"beat/{self.rank}", f"{beat} {self.memory}")
                self._listen()
            except Exception:  # no answer from the store: the silence is what check() sees
                pass
            self._leaving.wait(SECONDS_BETWEEN_BEATS)

    def _listen(self) -> None:
        there = [other for other in self._others if other in self._beats or self._store.check([f"beat/{other}"])]
        for other, value in zip(there, self._store.multi_get([f"beat/{n}" for n in there]), strict=True):
            text = value.decode()
            if text != self._beats.get(other):
                self._beats[other], self._heard_at[other] = text, time.monotonic()
                self._memory_of[other] = int(text.split()[1])
            elif other not in self._left and self._store.check([f"left/{other}"]):
                self._left.add(other)
        if self._failure is None and self._store.check([FAILED]):
            rank, reason = json.loads(self._store.get(FAILED))
            if rank != self.rank:
                self._failure = (rank, reason)
