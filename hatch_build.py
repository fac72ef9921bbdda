"""What makes a wheel carry the C code: all variants for the kind of CPU that it is built on, compiled beforehand.

Where that cannot be done the wheel is for all platforms: it compiles the code when it is first used, or leaves the
networks to torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        sys.path.insert(0, self.root)
        from rl_cluster_benchmark.kernels import build

        os.environ.pop("RLCB_KERNEL_FLAGS", None)  # they are for trying things out, and part of a library's name
        shutil.rmtree(build.BUILT, ignore_errors=True)
        built = list(build.build_all(build.BUILT))
        if not built:
            self.app.display_warning(
                "No C compiler works here: the wheel has no compiled code, and is for all platforms."
            )
            return
        self.app.display_info(f"Compiled code in the wheel: {', '.join(path.name for path in built)}")
        build_data["force_include"] |= {str(path): str(path.relative_to(Path(self.root))) for path in built}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag_of_platform()}"


def tag_of_platform() -> str:
    """Return the platform as wheels name it: the compiler compiles for one machine, though Python may run on two."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")
