"""What was found, in words: a table of the machines, a sentence for each problem with its remedy, what to expect."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rl_cluster_benchmark.cluster import network
from rl_cluster_benchmark.core.text import NOTHING, table
from rl_cluster_benchmark.tools.checkup import expectation
from rl_cluster_benchmark.tools.checkup.hosts import Answer, able_to_meet
from rl_cluster_benchmark.tools.checkup.probe import Measurements, Member, Sums

PROBLEM, WARNING = "PROBLEM", "warning"
SECONDS_OF_SKEW = 1.0
SLOW_MACHINE, SLOW_LINK = 1.25, 0.5  # times the median
MUST_AGREE = ("rl_cluster_benchmark", "source", "torch", "numpy", "envpool")
HEAD = ("machine", "address", "cores", "rlcb", "torch", "python", "clock", "round trip", "link", "passes/s")


class Trouble(NamedTuple):
    level: str
    sentence: str  # what, and where
    remedy: str


@dataclass(frozen=True)
class CheckedMachine:
    """A machine as ssh found it (None: we are in its allocation), and as it was measured (None: it was not)."""

    answer: Answer | None
    member: Member | None

    @property
    def name(self) -> str:
        return self.answer.host.name if self.answer else self.member.name if self.member else ""

    @property
    def versions(self) -> Mapping[str, str | None]:
        return self.member.versions if self.member else self.answer.versions if self.answer else {}


@dataclass(frozen=True)
class Checkup:
    """All machines that were looked at, and what they measured together."""

    machines: Sequence[CheckedMachine]
    sums: Sums | None = None
    errors: Mapping[str, str] = field(default_factory=dict)  # of machines that did not come to the measurement

    @classmethod
    def of(
        cls, measured: Measurements | None, answers: Sequence[Answer] = (), errors: Mapping[str, str] | None = None
    ) -> Checkup:
        """Return the checkup of machines that were measured in the order of their answers."""
        members = list(measured.members) if measured else []
        if not answers:
            return cls([CheckedMachine(None, member) for member in members], measured.sums if measured else None)
        of_host = dict(zip((answer.host.name for answer in able_to_meet(answers)), members, strict=False))
        machines = [CheckedMachine(answer, of_host.get(answer.host.name)) for answer in answers]
        return cls(machines, measured.sums if measured else None, errors or {})

    @property
    def members(self) -> list[Member]:
        return [machine.member for machine in self.machines if machine.member]


def text(checkup: Checkup) -> tuple[str, bool]:
    """Return the whole report, and whether something would stop a run."""
    lines = table(HEAD, [_row(machine) for machine in checkup.machines])
    lines += ["", *_sums(checkup), ""]
    found = list(troubles(checkup))
    for trouble in found:
        lines += [f"  {trouble.level:<8} {trouble.sentence}", f"  {'':<8} -> {trouble.remedy}"]
    stops = any(trouble.level == PROBLEM for trouble in found)
    lines.append("" if found else "No problem was found.")
    lines.append("A run would not start, or not go well: see the lines marked PROBLEM." if stops else "Ready to train.")
    return "\n".join(lines), stops


def _row(machine: CheckedMachine) -> list[str]:
    member, versions = machine.member, machine.versions
    known = [versions.get(name) or NOTHING for name in ("rl_cluster_benchmark", "torch", "python")]
    if member is None:
        answer = machine.answer
        cores = str(answer.usable_cores) if answer and answer.usable_cores else NOTHING
        return [machine.name, answer.host.address if answer else NOTHING, cores, *known, *[NOTHING] * 4]
    link = member.link
    return [
        machine.name,
        f"{member.address} ({member.interface})",
        str(member.usable_cores),
        *known,
        "the head's" if link is None else f"{1e3 * link.skew:+.1f} ms",
        NOTHING if link is None else f"{1e3 * link.round_trip:.2f} ms",
        NOTHING if link is None else rate(link.bandwidth),
        f"{1 / member.pass_seconds:.1f}",
    ]


def rate(bytes_per_second: float) -> str:
    megabits = bytes_per_second * 8 / 1e6
    return f"{megabits / 1e3:.2f} Gbit/s" if megabits >= 1e3 else f"{megabits:.1f} Mbit/s"


def _sums(checkup: Checkup) -> list[str]:
    sums = checkup.sums
    if sums is None:
        return ["The machines were not measured together." if len(checkup.members) < 2 else ""]
    found = expectation.network_of(sums)
    return [
        f"All-reduce of {sums.size / 1e6:.1f} MB over {sums.nodes} machines: {1e3 * sums.gradient:.1f} ms "
        f"({1e3 * sums.compressed:.1f} ms in bfloat16); of 64 numbers: {1e3 * sums.small:.2f} ms.",
        f"That is {rate(found.bandwidth)} and {1e3 * found.latency:.2f} ms a hop in Gloo's ring.",
        *expectation.lines(checkup.members, sums),
    ]


def troubles(checkup: Checkup) -> Iterator[Trouble]:
    for machine in checkup.machines:
        if machine.answer and machine.answer.trouble:
            yield Trouble(PROBLEM, f"{machine.name} {machine.answer.trouble}.", machine.answer.remedy)
    yield from _versions(checkup)
    yield from _meeting(checkup)
    yield from _clocks(checkup.members)
    yield from _loopback(checkup.members)
    yield from _shares(checkup)
    yield from _slow_ones(checkup.members)
    if checkup.sums is not None and (advice := expectation.advice(checkup.members, checkup.sums)):
        yield Trouble(WARNING, *advice)


def _versions(checkup: Checkup) -> Iterator[Trouble]:
    known = [machine for machine in checkup.machines if machine.versions.get("rl_cluster_benchmark")]
    for machine in known[1:]:
        head = known[0]
        for what in MUST_AGREE:
            here, there = machine.versions.get(what), head.versions.get(what)
            if here != there and None not in (here, there):
                sentence = f"{machine.name} has {what} {_short(here)}, the head ({head.name}) has {_short(there)}."
                yield Trouble(PROBLEM, sentence, "install the same version on all machines")
        if machine.versions.get("python") != head.versions.get("python"):
            here, there = machine.versions.get("python"), head.versions.get("python")
            sentence = f"{machine.name} has Python {here}, the head ({head.name}) has {there}."
            yield Trouble(WARNING, sentence, "nothing is known to break; the same one is safer")


def _short(version: str | None) -> str:
    """Return a commit's name in a few letters; the + behind it says that files were changed."""
    text = version or NOTHING
    return text if len(text) < 40 else text[:10] + text[40:]


def _meeting(checkup: Checkup) -> Iterator[Trouble]:
    """Say what kept machines that are reachable from talking to each other; the same sentence once."""
    by_sentence: dict[str, list[str]] = {}
    for name, error in checkup.errors.items():
        by_sentence.setdefault(error, []).append(name)
    for error, names in by_sentence.items():
        remedy = "open the ports between the machines (docs/cluster.md, Security); see addr=, --interface"
        yield Trouble(PROBLEM, f"{', '.join(names)}: {error}", remedy)


def _clocks(members: Sequence[Member]) -> Iterator[Trouble]:
    for member in members:
        if member.link and abs(member.link.skew) - member.link.round_trip / 2 > SECONDS_OF_SKEW:
            way = "ahead of" if member.link.skew > 0 else "behind"
            sentence = f"{member.name}'s clock is {abs(member.link.skew):.1f} s {way} the head's."
            yield Trouble(WARNING, sentence, "synchronise the clocks (chrony, ntpd): logs and file times disagree")


def _loopback(members: Sequence[Member]) -> Iterator[Trouble]:
    several = len({member.boot for member in members}) > 1
    for member in members:
        if several and network.Endpoint(member.address, member.interface).is_loopback:
            sentence = f"{member.name} would talk to the others over the loopback interface ({member.address})."
            yield Trouble(PROBLEM, sentence, "give the head's address in the network (addr=, --master-addr)")


def _shares(checkup: Checkup) -> Iterator[Trouble]:
    by_boot: dict[str, list[str]] = {}
    for member in checkup.members:
        by_boot.setdefault(member.boot, []).append(member.name)
    for names in by_boot.values():
        if len(names) > 1:
            sentence = f"{', '.join(names)} are one machine, and share its cores."
            yield Trouble(WARNING, sentence, "name each machine once; their speeds were measured side by side")
    for machine in checkup.machines:
        wanted = machine.answer.host.workers if machine.answer else None
        cores = machine.answer.usable_cores if machine.answer else 0
        if wanted and cores and wanted > cores:
            sentence = f"{machine.name} is to run {wanted} workers on {cores} usable cores."
            yield Trouble(WARNING, sentence, f"workers={cores} in the hosts file; more only take turns")


def _slow_ones(members: Sequence[Member]) -> Iterator[Trouble]:
    """Name the machines and links that are slower than the others: all wait for the slowest."""
    usual = statistics.median(member.pass_seconds for member in members) if members else 0.0
    for member in members:
        if member.pass_seconds > SLOW_MACHINE * usual:
            sentence = f"{member.name} takes {member.pass_seconds / usual:.1f} times as long as the others for a pass."
            yield Trouble(WARNING, sentence, "is something else running there? All machines wait for the slowest")
    links = [member.link.bandwidth for member in members if member.link]
    for member in members:
        if member.link and member.link.bandwidth < SLOW_LINK * statistics.median(links):
            sentence = f"The link between the head and {member.name} has only {rate(member.link.bandwidth)}."
            yield Trouble(WARNING, sentence, f"the others have {rate(statistics.median(links))}: check cable and port")
