"""`rlcb doctor --cluster`: what is made of what machines say; on real hosts it is tested in cluster_tests/."""

import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.commands import ROOT, environment, rlcb

from rl_cluster_benchmark.tools.checkup import checkup_report, expectation, hosts
from rl_cluster_benchmark.tools.checkup.hosts import Answer
from rl_cluster_benchmark.tools.checkup.probe import Link, Measurements, Member, Sums
from rl_cluster_benchmark.tools.launch.ssh import Host, SshOptions
from rl_cluster_benchmark.tools.scaling import model

VERSIONS = {"rl_cluster_benchmark": "0.1.0", "source": "abc", "torch": "2.10", "numpy": "2.0", "envpool": "1.2.5"}
VERSIONS |= {"python": "3.11.7"}
LINK = Link(skew=0.001, round_trip=0.0002, bandwidth=1.25e9)
HEAD = Member("n1", "10.0.0.1", "eth0", "boot1", 16, "Xeon", VERSIONS, None, pass_seconds=0.05, jitter=0.01)
OTHERS = [replace(HEAD, name=f"n{i}", address=f"10.0.0.{i}", boot=f"boot{i}", link=LINK) for i in (2, 3, 4)]
SUMS = Sums(nodes=4, size=2_505_024, small=0.0006, gradient=0.006, compressed=0.004)
OPTIONS = SshOptions([], ["ssh"], "/here", "/venv/python", None, [])


def troubles_of(*members, answers=(), errors=None, sums=SUMS):
    return list(checkup_report.troubles(checkup_report.Checkup.of(Measurements(list(members), sums), answers, errors)))


def test_machines_that_are_well():
    shown, stops = checkup_report.text(checkup_report.Checkup.of(Measurements([HEAD, *OTHERS], SUMS)))
    assert not stops
    assert "No problem was found.\nReady to train." in shown
    for words in (
        "n4       10.0.0.4 (eth0)",
        "+1.0 ms",
        "0.20 ms",
        "10.00 Gbit/s",
        "20.0",
        "6.0 ms (4.0 ms in bfloat16)",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("change", "level", "sentence"),
    [
        ({"versions": VERSIONS | {"torch": "2.9"}}, "PROBLEM", "n3 has torch 2.9, the head (n1) has 2.10."),
        ({"versions": VERSIONS | {"source": "def"}}, "PROBLEM", "n3 has source def, the head (n1) has abc."),
        ({"versions": VERSIONS | {"python": "3.12.0"}}, "warning", "n3 has Python 3.12.0, the head (n1) has 3.11.7."),
        ({"link": replace(LINK, skew=-7.04)}, "warning", "n3's clock is 7.0 s behind the head's."),
        ({"address": "127.0.0.1"}, "PROBLEM", "n3 would talk to the others over the loopback interface (127.0.0.1)."),
        ({"boot": "boot2"}, "warning", "n2, n3 are one machine, and share its cores."),
        ({"pass_seconds": 0.1}, "warning", "n3 takes 2.0 times as long as the others for a pass."),
        (
            {"link": replace(LINK, bandwidth=12.5e6)},
            "warning",
            "The link between the head and n3 has only 100.0 Mbit/s.",
        ),
    ],
)
def test_each_trouble_is_named_once(change, level, sentence):
    second, third, fourth = OTHERS
    (found,) = troubles_of(HEAD, second, replace(third, **change), fourth)
    assert (found.level, found.sentence) == (level, sentence)
    assert found.remedy


def test_a_clock_is_not_blamed_for_a_slow_answer():
    slow = replace(LINK, skew=1.4, round_trip=1.0)  # it may be anything from 0.9 to 1.9 s
    assert not troubles_of(HEAD, replace(OTHERS[0], link=slow), sums=None)


def test_a_slow_network_comes_with_advice():
    slow = Sums(nodes=4, size=2_505_024, small=0.06, gradient=0.6, compressed=0.3)
    (found,) = troubles_of(HEAD, *OTHERS, sums=slow)
    assert found.level == "warning"
    assert "cluster.sync=local_sgd" in found.remedy


def test_expectations_follow_the_model():
    members = [HEAD, *OTHERS]
    network, work = expectation.network_of(SUMS), expectation.work_of(members, SUMS.size)
    assert model.ring_seconds(4, SUMS.size, network) == pytest.approx(SUMS.gradient)
    assert model.ring_seconds(4, 0, network) == pytest.approx(SUMS.small)
    # 64 workers x 16 environments x 128 steps in minibatches of 2048: 64 in each of 4 epochs, 32 samples a worker.
    assert work.minibatches == 256
    assert work.minibatch_seconds == pytest.approx(0.05 / 64 * 32)
    spread = model.Spread(0.0, 0.01, 0.05)
    expected = model.project("allreduce", 4, work, network, spread).efficiency
    assert expectation.efficiencies(members, SUMS)["allreduce"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("status", "output", "trouble"),
    [
        (255, "ssh: connect to host n9 port 22: Connection refused\r\n", "cannot be reached: ssh: connect to host n9"),
        (127, "bash: /venv/python: No such file or directory\n", "has no /venv/python: bash:"),
        (1, "bash: cd: /here: No such file or directory\r\n", "did not answer (status 1): bash: cd: /here"),
        (0, 'RLCB-DOCTOR {"versions": {}, "error": "ModuleNotFoundError: torch"}', "cannot load the program: Module"),
    ],
)
def test_what_silence_means(status, output, trouble):
    answer = hosts.understand(Host("n9", "n9"), status, output, OPTIONS)
    assert not answer.is_ready
    assert answer.trouble.startswith(trouble)
    (found,) = troubles_of(answers=[answer], sums=None)
    assert found.level == "PROBLEM"
    assert found.remedy == answer.remedy


def test_an_answer_among_other_words():
    output = 'Welcome!\r\nRLCB-DOCTOR {"versions": {"torch": "2.10"}, "usable_cores": 8}\r\n'
    answer = hosts.understand(Host("n9", "n9", workers=12), 0, output, OPTIONS)
    assert (answer.is_ready, answer.usable_cores, answer.versions) == (True, 8, {"torch": "2.10"})
    (found,) = troubles_of(answers=[answer], sums=None)
    assert found.sentence == "n9 is to run 12 workers on 8 usable cores."


def test_machines_keep_their_rows_when_some_do_not_answer():
    """Measured are those that answered, in order; the table has all."""
    answers = [Answer(Host("a", "a")), Answer(Host("b", "b"), "is gone", "look for it"), Answer(Host("c", "c"))]
    checkup = checkup_report.Checkup.of(Measurements([HEAD, OTHERS[0]], None), answers)
    assert [(machine.name, machine.member and machine.member.name) for machine in checkup.machines] == [
        ("a", "n1"), ("b", None), ("c", "n2"),
    ]  # fmt: skip
    shown, stops = checkup_report.text(checkup)
    assert stops
    assert "b is gone." in shown
    assert "-> look for it" in shown


def test_the_same_error_of_several_machines_is_told_once():
    errors = {"a": "no route", "b": "no route"}
    answers = [Answer(Host("a", "a")), Answer(Host("b", "b"))]
    (found,) = checkup_report.troubles(checkup_report.Checkup.of(None, answers, errors))
    assert found.sentence == "a, b: no route"


def test_a_machine_that_has_the_program_answers_the_question():
    call = [sys.executable, "-c", hosts.QUESTION]
    done = subprocess.run(call, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    answer = hosts.understand(Host("n9", "n9"), done.returncode, done.stdout, OPTIONS)
    assert answer.is_ready, answer.trouble
    assert answer.usable_cores >= 1
    assert {"python", "torch", "source"} <= answer.versions.keys()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "Say which machines: --hosts FILE"),
        (("--hosts", "/no/such/hosts.txt"), "The hosts file /no/such/hosts.txt does not exist."),
        (("--timeout", "0"), "0 is not allowed; it must be a number of seconds from 2 to 3600"),
        (("--num-nodes", "0"), "0 is not allowed; it must be a whole number of at least 1"),
        (("--num-nodes", "2", "--node-rank", "2"), "--node-rank 2 is not one of 2 machines"),
    ],
)
def test_wrong_input_is_answered_with_a_sentence(args, sentence):
    done = rlcb("doctor", "--cluster", *args)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
