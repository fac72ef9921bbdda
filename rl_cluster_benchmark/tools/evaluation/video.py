"""Episodes to look at: recorded side by side as GIF or MP4, or live in a window."""

from __future__ import annotations

import io
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import write_output

MAX_TILES = 9
MAX_FRAMES = 1000
SCALE = 3
CLIP_TILES, CLIP_SCALE, CLIP_FRAMES = 4, 1, 100  # of a .webp, small enough for a page
FRAMES_PER_SECOND = 15


class Screen(Protocol):
    def __call__(self, observations: NDArray) -> None: ...

    def close(self, mark: bytes = b"") -> None: ...


def clip_mark(digest: str | None, policy: str) -> bytes:
    """Return what a clip carries: the digest of the checkpoint that it was made with, and who played."""
    return f"rlcb-checkpoint:{digest} policy:{policy}.".encode()


def mark_of_clip(content: bytes) -> tuple[str, str] | None:
    """Return (digest, policy) as the clip carries them; None if it does not say."""
    found = re.search(rb"rlcb-checkpoint:([0-9a-f]{64}) policy:([a-z]{1,10})\.", content)
    return (found[1].decode(), found[2].decode()) if found else None


def open_screen(video: Path | None, render: bool) -> Screen | None:
    """Return where evaluated frames go, checked before any episode is played."""
    if video is not None and render:
        raise UserError("Give either --video or --render, not both.")
    if video is not None:
        return FrameRecorder(video)
    return Window() if render else None


class FrameRecorder:
    """Keeps the frames of the first environments; writes them when closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: list[NDArray] = []
        if path.suffix not in (".gif", ".mp4", ".webp"):
            raise UserError(f"--video {path}: the name must end in .gif or .mp4 (or .webp, a short clip).")
        self._is_clip = path.suffix == ".webp"
        if not path.parent.is_dir():
            raise UserError(f"--video {path}: the folder {path.parent} does not exist.")
        if not os.access(path.parent, os.W_OK) or path.is_dir():
            raise UserError(f"--video {path} cannot be written.")
        if path.suffix == ".mp4":
            _ffmpeg()

    def __call__(self, observations: NDArray) -> None:
        if len(self.frames) < (CLIP_FRAMES if self._is_clip else MAX_FRAMES):
            size = (CLIP_TILES, CLIP_SCALE) if self._is_clip else (MAX_TILES, SCALE)
            self.frames.append(tile(observations, *size))  # a copy: the array may be used again

    def close(self, mark: bytes = b"") -> None:
        """Write the file; the mark goes into a .webp or .gif, and says whose games it shows."""
        try:
            if self.path.suffix == ".mp4":
                self._write_mp4()
            else:
                self._write_animation(mark)
        except OSError as error:
            raise UserError(f"Cannot write {self.path} ({error.strerror or error}).") from None
        print(f"Saved {self.path} ({len(self.frames)} frames)")

    def _write_animation(self, mark: bytes) -> None:
        from PIL import Image

        first, *rest = (Image.fromarray(frame) for frame in self.frames)
        options: dict[str, Any] = {"quality": 60, "method": 4, "xmp": mark} if self._is_clip else {"comment": mark}
        options |= {"format": self.path.suffix.removeprefix("."), "duration": 1000 // FRAMES_PER_SECOND, "loop": 0}
        content = io.BytesIO()
        first.save(content, save_all=True, append_images=rest, **options)
        write_output(self.path, content.getvalue())

    def _write_mp4(self) -> None:
        height, width, _ = self.frames[0].shape
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "video.mp4")
            writer = _ffmpeg().write_frames(str(file), (width, height), fps=FRAMES_PER_SECOND, macro_block_size=2)
            writer.send(None)
            for frame in self.frames:
                writer.send(np.ascontiguousarray(frame))
            writer.close()
            write_output(self.path, file.read_bytes())


class Window:
    def __init__(self) -> None:
        if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            raise UserError("--render needs a display and there is none; record with --video FILE.gif instead.")
        import matplotlib

        try:
            matplotlib.use("TkAgg")
            import matplotlib.pyplot as plt

            self._figure, self._axis = plt.subplots(num="rlcb evaluate")
        except Exception as error:
            raise UserError(f"--render cannot open a window ({error}); record with --video FILE.gif instead.") from None
        self._axis.axis("off")
        self._image = None
        self._plt = plt

    def __call__(self, observations: NDArray) -> None:
        frame = tile(observations)
        if self._image is None:
            self._image = self._axis.imshow(frame)  # type: ignore[assignment]
            self._plt.show(block=False)
        else:
            self._image.set_data(frame)
        self._plt.pause(1 / FRAMES_PER_SECOND)

    def close(self, mark: bytes = b"") -> None:
        self._plt.close(self._figure)


def tile(observations: NDArray, tiles: int = MAX_TILES, scale: int = SCALE) -> NDArray:
    """Return the images [N, H, W, 3] of the first environments side by side, enlarged."""
    if observations.ndim != 4 or observations.dtype != np.uint8:
        raise UserError("Only games with images can be recorded or shown; CartPole-v1 and Catch-v0 have none.")
    shown = observations[:tiles]
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    _, height, width, channels = shown.shape
    grid = np.zeros((rows * columns, height, width, channels), dtype=np.uint8)
    grid[: len(shown)] = shown
    image = (
        grid.reshape(rows, columns, height, width, channels).swapaxes(1, 2).reshape(rows * height, columns * width, -1)
    )
    return image.repeat(scale, axis=0).repeat(scale, axis=1)


def _ffmpeg():  # type: ignore[no-untyped-def]
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError("Writing .mp4 needs imageio-ffmpeg: pip install imageio-ffmpeg; or write a .gif.") from None
    return imageio_ffmpeg
