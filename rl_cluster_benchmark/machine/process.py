"""Settings of this process: threads, memory, device and number type."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from rl_cluster_benchmark.core.errors import UserError

if TYPE_CHECKING:
    import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def prepare_process(num_threads: int) -> None:
    """Set the threads of every numeric library together, and keep freed memory for the next tensor.

    The command line calls it before it imports anything that imports numpy or torch: OpenBLAS, MKL and OpenMP read
    their variables once, when they start.
    """
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)
    _keep_freed_memory()
    import torch

    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def check_device(name: str) -> None:
    """Raise a UserError if the config asks for a CUDA device that is not there."""
    if name == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"hardware.device = {name}, but this torch sees no CUDA device; use cpu.")
    index = torch.device(name).index
    if index is not None and index >= torch.cuda.device_count():
        raise UserError(f"hardware.device = {name}, but there are {torch.cuda.device_count()} devices.")


def dtype(precision: str) -> torch.dtype:
    import torch

    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def _keep_freed_memory() -> None:
    """Let glibc reuse freed memory: by default it maps every large tensor anew, with a page fault for each page."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # not glibc: slower, not wrong
