"""Programs that run as child processes."""

import time

from rl_cluster_benchmark.processes.child_process import ChildProcess, reason_of_failure


def reason(output, script):
    """Run a script, whose output is appended to the file; return why it failed."""
    child = ChildProcess(["sh", "-c", script], output=output)
    while not child.has_ended():
        time.sleep(0.01)
    return reason_of_failure(output, child.status, child.output_begins)


def test_the_reason_of_a_failure_is_not_that_of_an_earlier_run_with_the_same_log(tmp_path):
    output = tmp_path / "cell.log"
    assert reason(output, "echo 'Step: 1 ± 0'; echo 'error: The disk is full.'; exit 1") == "The disk is full."
    assert reason(output, "echo Step: 2; kill -9 $$") == "it was killed by SIGKILL"
    assert reason(output, "exit 3") == f"it ended with status 3; see {output}"
    assert reason(output, "echo 'error: A worker was killed.'; exit 1") == "A worker was killed."
