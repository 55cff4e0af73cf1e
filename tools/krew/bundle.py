"""Builds the archive of the command line for one platform."""

from __future__ import annotations

import gzip
import io
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.images.programs import run
from tools.images.sources import REPOSITORY
from tools.krew.interpreter import PACKAGES, add_interpreter, download
from tools.krew.manifest import PROGRAM
from tools.krew.platforms import PYTHON, Platform

_PACKED = Path(__file__).parent / "packed"
_COMPRESSION = 6
"""Level of gzip; the highest level takes four times as long and saves only 2 %."""
_PROGRAMS = (PROGRAM, f"python{PYTHON}")


def bundle(version: str, target: Platform, packages: Sequence[Path] = ()) -> bytes:
    """Return the archive. The same sources, locks and Debian packages give the same bytes.

    packages: the Debian packages with the interpreter; empty to download them.
    Raises:
        ImageError: uv or apt is not installed or failed, or a library is missing or for another machine.
        OSError: a file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="krew-") as scratch:
        root = Path(scratch) / "bundle"
        _add_command_line(root / "lib", version, target, Path(scratch))
        shutil.copyfile(REPOSITORY / "LICENSE", root / "LICENSE")
        shutil.copyfile(_PACKED / "start.py", root / "start.py")
        shutil.copyfile(_PACKED / PROGRAM, root / PROGRAM)
        if target.debian is not None:
            taken = packages or download(target.arch, PACKAGES, Path(scratch) / "debian")
            add_interpreter(root / "python", target.debian, taken, root / "lib")
            starter = (_PACKED / f"python{PYTHON}").read_text().replace("@LOADER@", target.debian.loader)
            (root / "python/bin").mkdir()
            (root / f"python/bin/python{PYTHON}").write_text(starter)
        _compile(root)
        return _packed(root)


def _add_command_line(library: Path, version: str, target: Platform, scratch: Path) -> None:
    uv, locked, wheels = (sys.executable, "-m", "uv"), scratch / "requirements.txt", scratch / "wheel"
    chosen = ("--frozen", "--no-emit-project", "--no-dev", "--extra", "cli")
    # The Kubernetes package also contains a client for asyncio, which is not used here.
    without = ("--prune", "aiohttp", "--prune", "aiohttp-retry")
    locked.write_text(run(*uv, "export", "--quiet", "--project", REPOSITORY, *chosen, *without))
    install = (*uv, "pip", "install", "--quiet", "--target", library, "--no-deps")
    of_target = ("--python-version", PYTHON, "--python-platform", target.wheels, "--only-binary", ":all:")
    run(*install, *of_target, "--require-hashes", "--requirements", locked)
    run(*uv, "build", "--quiet", "--wheel", "--out-dir", wheels, REPOSITORY)
    [wheel] = wheels.glob("*.whl")
    run(*install, wheel)
    shutil.rmtree(library / "bin")
    shutil.rmtree(library / "kubernetes/aio")
    (library / ".lock").unlink(missing_ok=True)
    _describe(library, version)


def _describe(library: Path, version: str) -> None:
    """Let `--version` print the bundle's version, because the sources have the same version between two releases.

    Files that name the directory of this build are removed.
    """
    [metadata] = library.glob("finetune_operator-*.dist-info/METADATA")
    for about in ("direct_url.json", "uv_cache.json", "RECORD"):
        metadata.with_name(about).unlink(missing_ok=True)
    metadata.write_text(re.sub(r"^Version: .*$", f"Version: {version}", metadata.read_text(), count=1, flags=re.MULTILINE))


def _compile(root: Path) -> None:
    """Add bytecode: Krew's store may be read-only, and compiling would delay the first command by more than a second.

    Python does not compare it with the sources, because their times are those of the unpacking.
    """
    for cache in list(root.rglob("__pycache__")):
        shutil.rmtree(cache)
    folders = [folder for folder in (root / "lib", root / f"python/lib/python{PYTHON}") if folder.exists()]
    command = (sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", root)
    # Bytecode contains sets of constants in the order of their hashes.
    run(*command, *folders, environment={"PYTHONHASHSEED": "0"})


def _packed(root: Path) -> bytes:
    """Pack directories and plain files only, because Krew unpacks nothing else."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=_COMPRESSION, mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for path in sorted(root.rglob("*")):
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                continue
            content = path.read_bytes()
            runs = path.name in _PROGRAMS or path.name.startswith("ld-linux")
            entry.size, entry.mode = len(content), 0o755 if runs else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
