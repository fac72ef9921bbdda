"""The short form of kills.py: killed, resumed, checked. `make test-faults` does it 300 times, in every mode."""

import os

import kills
import pytest
from harness import MODES


@pytest.mark.parametrize("mode", [MODES[1], pytest.param(MODES[4], marks=pytest.mark.long)], ids=lambda mode: mode.name)
def test_kills(mode):
    seed = int(os.environ.get("RLCB_FAULT_SEED", "1"))
    print(f"RLCB_FAULT_SEED={seed}")
    results, _ = kills.strike(1, seed, [mode], 2.0, ("worker", "term", "group"))
    assert len(results) == 1
