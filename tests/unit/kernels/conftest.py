"""The networks' libraries for CPUs with AMX, for any CPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from functools import cache

import pytest
from helpers.commands import ROOT

from rl_cluster_benchmark.kernels import build, native_network


@pytest.fixture(scope="session")
def with_emulated_tiles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """architecture -> its library with the tiles emulated in plain C: few machines have them."""
    folder, header = tmp_path_factory.mktemp("emulated"), ROOT / "tests" / "helpers" / "emulated_amx.h"

    @cache
    def library(architecture: str) -> ctypes.CDLL:
        file, made = build.FOLDER / native_network.SOURCES[architecture].file, folder / f"{architecture}.so"
        subprocess.run(["cc", *build.FLAGS, "-include", header, file, "-o", made], check=True)
        return ctypes.CDLL(str(made))

    return library
