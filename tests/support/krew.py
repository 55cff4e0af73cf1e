"""`python -m tests.support.krew --version V --url U` writes `kubectl finetune` as Krew installs it.

That is an archive for each platform, and the manifest that names them.

An archive holds the command line with its locked dependencies, without the trainer's. It needs Python 3.11 and nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import platform
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.images.errors import ImageError
from tests.support.images.programs import run
from tests.support.images.sources import REPOSITORY

VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")
_PYTHON = "3.11"
_PROGRAM = "kubectl-finetune"
_LAUNCHER = f"""#!/bin/sh
# Krew links to this file; the bundle is where the link leads.
self=$0
while [ -h "$self" ]; do
  target=$(readlink "$self")
  case $target in
    /*) self=$target ;;
    *) self=$(dirname "$self")/$target ;;
  esac
done
here=$(cd "$(dirname "$self")" && pwd -P)
python=${{FINETUNE_PYTHON:-python{_PYTHON}}}
if ! command -v "$python" > /dev/null; then
  echo "kubectl finetune needs Python {_PYTHON}: there is no $python on PATH. Install it, or set FINETUNE_PYTHON to its path" >&2
  exit 2
fi
exec "$python" -I -S "$here/start.py" "$@"
"""
_START = f"""import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here / "lib"))
sys.argv[0] = str(here / "{_PROGRAM}")

from finetune_cli.__main__ import main

main()
"""
_DESCRIPTION = """Validates FineTuneJobs without a cluster, explains every finding, submits and follows jobs, shows their logs,
losses and checkpoints, says why one failed and what to change, and downloads results. To compute on your
own machine (run, merge, data, rehearse), install the Python package instead.
"""


@dataclass(frozen=True)
class Platform:
    """One that Krew names."""

    os: str
    arch: str
    wheels: str
    """What uv calls it."""

    @property
    def name(self) -> str:
        return f"{self.os}-{self.arch}"


PLATFORMS = (
    Platform("linux", "amd64", "x86_64-manylinux_2_28"),
    Platform("linux", "arm64", "aarch64-manylinux_2_28"),
    Platform("darwin", "amd64", "x86_64-apple-darwin"),
    Platform("darwin", "arm64", "aarch64-apple-darwin"),
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def own_platform() -> str:
    """Name of this machine's."""
    machine = platform.machine()
    return f"{platform.system().lower()}-{_ARCHITECTURES.get(machine, machine)}"


def archive_name(version: str, target: Platform) -> str:
    return f"{_PROGRAM}-v{version}-{target.name}.tar.gz"


def manifest(version: str, url: str, sha256: Mapping[Platform, str]) -> dict[str, Any]:
    """What Krew reads. url: of the directory that will hold the archives. sha256: of each archive."""
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "finetune"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "Validate, submit, follow and explain fine-tuning jobs",
            "description": _DESCRIPTION,
            "caveats": f"Needs Python {_PYTHON} as python{_PYTHON} on PATH, or its path in FINETUNE_PYTHON.\n",
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": target.os, "arch": target.arch}},
                    "uri": f"{url.rstrip('/')}/{archive_name(version, target)}",
                    "sha256": digest,
                    "bin": _PROGRAM,
                }
                for target, digest in sha256.items()
            ],
        },
    }


def bundle(version: str, target: Platform) -> bytes:
    """The archive: equal sources and locks give equal bytes. Raises ImageError if uv is not there or failed, OSError."""
    uv = (sys.executable, "-m", "uv")
    with tempfile.TemporaryDirectory(prefix="krew-") as scratch:
        root, locked, wheels = Path(scratch) / "bundle", Path(scratch) / "requirements.txt", Path(scratch) / "wheel"
        chosen = ("--frozen", "--no-emit-project", "--no-dev", "--extra", "cli")
        locked.write_text(run(*uv, "export", "--quiet", "--project", REPOSITORY, *chosen))
        install = (*uv, "pip", "install", "--quiet", "--target", root / "lib", "--no-deps")
        of_target = ("--python-version", _PYTHON, "--python-platform", target.wheels, "--only-binary", ":all:")
        run(*install, *of_target, "--require-hashes", "--requirements", locked)
        run(*uv, "build", "--quiet", "--wheel", "--out-dir", wheels, REPOSITORY)
        [wheel] = wheels.glob("*.whl")
        run(*install, wheel)
        shutil.rmtree(root / "lib/bin")
        (root / "lib/.lock").unlink(missing_ok=True)
        _describe(root / "lib", version)
        shutil.copyfile(REPOSITORY / "LICENSE", root / "LICENSE")
        (root / "start.py").write_text(_START)
        (root / _PROGRAM).write_text(_LAUNCHER)
        return _packed(root)


def _describe(library: Path, version: str) -> None:
    """Have `--version` say what the bundle is called, because the sources have one version between two releases.

    What names the directory of this build goes.
    """
    [metadata] = library.glob("finetune_operator-*.dist-info/METADATA")
    for about in ("direct_url.json", "uv_cache.json", "RECORD"):
        metadata.with_name(about).unlink(missing_ok=True)
    metadata.write_text(re.sub(r"^Version: .*$", f"Version: {version}", metadata.read_text(), count=1, flags=re.MULTILINE))


def _packed(root: Path) -> bytes:
    """Directories and plain files alone, because Krew unpacks nothing else."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for path in sorted(root.rglob("*")):
            if path.suffix == ".pyc" or path.name == "__pycache__":
                continue
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
                continue
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if path.name == _PROGRAM else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.krew", description=__doc__)
    parser.add_argument("--version", required=True, help="as in 0.2.0")
    parser.add_argument("--url", required=True, help="of the directory from which people will load the archives")
    parser.add_argument(
        "--platform", action="append", choices=[one.name for one in PLATFORMS], help="repeated; unset: that of this machine"
    )
    parser.add_argument("--output", type=Path, default=Path("build/krew"))
    given = parser.parse_args()
    if not VERSION.fullmatch(given.version):
        parser.error(f"--version {given.version}: a release is named by three numbers, as in 0.2.0 or 0.2.0-rc.1")
    if not given.url.startswith("https://"):
        parser.error(f"--url {given.url}: Krew loads archives from an address that begins with https://")
    wanted = given.platform or [own_platform()]
    given.output.mkdir(parents=True, exist_ok=True)
    sha256 = {}
    try:
        for target in (one for one in PLATFORMS if one.name in wanted):
            content = bundle(given.version, target)
            (given.output / archive_name(given.version, target)).write_bytes(content)
            sha256[target] = hashlib.sha256(content).hexdigest()
            print(f"{given.output / archive_name(given.version, target)}: {len(content) / 2**20:.1f} MiB")
    except ImageError as error:
        print(f"krew: {error}", file=sys.stderr)
        return 1
    if not sha256:
        print(f"krew: Krew has no name for this machine, {own_platform()}; choose a --platform", file=sys.stderr)
        return 1
    made = given.output / "finetune.yaml"
    made.write_text(yaml.safe_dump(manifest(given.version, given.url, sha256), sort_keys=False, width=120))
    archives = [given.output / archive_name(given.version, target) for target in sha256 if target.name == own_platform()]
    if archives:
        print(f"try it: kubectl krew install --manifest {made} --archive {archives[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
