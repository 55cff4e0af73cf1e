"""The directory of wheels that an image is installed from."""

import shutil
import sys
import tempfile
from pathlib import Path

from tools.images.programs import run, timed
from tools.images.sources import Sources

_PIP = "pip==26.3"


def wheelhouse(sources: Sources, directory: Path) -> Path:
    """Return the folder in `directory` with the wheels of the image's locks. Downloads them if it is missing.

    Raises:
        ImageError: a download failed, or a file's hash is not in the lock.
    """
    target = directory / f"{sources.name}-{sources.wheelhouse_hash}"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    for older in directory.glob(f"{sources.name}-*"):
        shutil.rmtree(older)
    with tempfile.TemporaryDirectory(dir=directory, prefix="downloading-") as scratch, timed(f"{target.name}: wheels"):
        wheels = Path(scratch) / "wheels"
        run(
            *(sys.executable, "-m", "uv", "tool", "run", "--quiet", "--python", sys.executable, "--from", _PIP),
            *("pip", "download", "--quiet", "--no-cache-dir", "--disable-pip-version-check", "--dest", wheels),
            *("--no-deps", "--require-hashes", "--only-binary", ":all:"),
            *(part for lock in sources.locks for part in ("--requirement", lock)),
        )
        wheels.rename(target)
    return target
