"""The library for CPUs with AMX, for any CPU that has the rest of what it needs."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers.commands import ROOT

from rl_cluster_benchmark.kernels import build, choice, heads, native_network

AMX = next(variant for variant in build.VARIANTS if variant.name == "amx")


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> build.Library:
    """Return the library with the tiles emulated in plain C: few machines have them."""
    compiler, others = build.compiler(), {feature for feature in AMX.features if not feature.startswith("amx")}
    if compiler is None or not others <= build.cpu_features():
        pytest.skip("needs a C compiler and AVX512-BF16")
    made, header = tmp_path_factory.mktemp("emulated") / "amx.so", ROOT / "tests" / "helpers" / "emulated_amx.h"
    source = build.FOLDER / AMX.source
    subprocess.run([compiler, *build.FLAGS, *AMX.flags, "-include", header, source, "-o", made, "-lm"], check=True)
    return build.Library(AMX, ctypes.CDLL(str(made)))


@pytest.fixture
def with_amx(emulated_amx: build.Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that gives this machine AMX, as emulated; its argument is RLCB_KERNELS."""
    original, features = build.load, build.cpu_features() | AMX.features

    def load(precision: str = "float32") -> build.Library | None:
        emulated = emulated_amx if build.wanted("bfloat16") else None
        return emulated if precision == "bfloat16" else original(precision)

    def forget() -> None:
        for cached in (original, native_network.available, choice.choose, heads._load):
            cached.cache_clear()

    def have(variant: str = "") -> None:
        forget()
        monkeypatch.setenv("RLCB_KERNELS", variant)
        monkeypatch.setattr(build, "cpu_features", lambda: features)
        monkeypatch.setattr(build, "load", load)

    yield have
    forget()


@pytest.fixture(params=["float32", "bfloat16"])
def precision(request: pytest.FixtureRequest) -> torch.dtype:
    """Each precision of the C code, on a machine that has it."""
    if request.param == "bfloat16":
        request.getfixturevalue("with_amx")()
    dtype: torch.dtype = native_network.DTYPES[request.param]
    return dtype
