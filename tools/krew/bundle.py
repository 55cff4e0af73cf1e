"""An archive of the command line for one platform."""

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
"""The highest takes four times as long, for a fiftieth less."""
_PROGRAMS = (PROGRAM, f"python{PYTHON}")


def bundle(version: str, target: Platform, packages: Sequence[Path] = ()) -> bytes:
    """The archive: equal sources, locks and packages of Debian give equal bytes.

    packages: those of Debian that are asked for; none: they are downloaded.
    Raises:
        ImageError: uv or apt is not there or failed, or what they brought does not fit together.
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
    # The Kubernetes client is there a second time, for asyncio, which nothing here uses.
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
    """Have `--version` say what the bundle is called, because the sources have one version between two releases.

    What names the directory of this build goes.
    """
    [metadata] = library.glob("finetune_operator-*.dist-info/METADATA")
    for about in ("direct_url.json", "uv_cache.json", "RECORD"):
        metadata.with_name(about).unlink(missing_ok=True)
    metadata.write_text(re.sub(r"^Version: .*$", f"Version: {version}", metadata.read_text(), count=1, flags=re.MULTILINE))


def _compile(root: Path) -> None:
    """Add bytecode: Krew's store need not be writable, and to compile costs the first command a second and more.

    It is not checked against the sources, whose times are those of the unpacking.
    """
    for cache in list(root.rglob("__pycache__")):
        shutil.rmtree(cache)
    folders = [folder for folder in (root / "lib", root / f"python/lib/python{PYTHON}") if folder.exists()]
    command = (sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", root)
    # Sets of constants are written in the order of their hashes.
    run(*command, *folders, environment={"PYTHONHASHSEED": "0"})


def _packed(root: Path) -> bytes:
    """Directories and plain files alone, because Krew unpacks nothing else."""
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
