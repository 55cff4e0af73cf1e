"""`python -m tools.krew --version V --url U`: write the archives of the Krew plugin `kubectl finetune`, and its manifest."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

import yaml

from tools.images.programs import ImageError
from tools.krew.bundle import bundle
from tools.krew.manifest import archive_name, manifest
from tools.krew.platforms import PLATFORMS, own_platform

VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.krew", description=__doc__)
    parser.add_argument("--version", required=True, help="version of the plugin, such as 0.2.0")
    parser.add_argument("--url", required=True, help="URL of the directory from which Krew will download the archives")
    parser.add_argument(
        "--platform", action="append", choices=[item.name for item in PLATFORMS], help="repeatable; default: this machine's"
    )
    parser.add_argument("--output", type=Path, default=Path("build/krew"))
    given = parser.parse_args()
    if not VERSION.fullmatch(given.version):
        parser.error(f"--version {given.version}: a version has three numbers, such as 0.2.0 or 0.2.0-rc.1")
    if not given.url.startswith("https://"):
        parser.error(f"--url {given.url}: Krew downloads archives only from an address that begins with https://")
    wanted = given.platform or [own_platform()]
    given.output.mkdir(parents=True, exist_ok=True)
    sha256 = {}
    try:
        for target in (item for item in PLATFORMS if item.name in wanted):
            content = bundle(given.version, target)
            (given.output / archive_name(given.version, target)).write_bytes(content)
            sha256[target] = hashlib.sha256(content).hexdigest()
            print(f"{given.output / archive_name(given.version, target)}: {len(content) / 2**20:.1f} MiB")
    except ImageError as error:
        print(f"krew: {error}", file=sys.stderr)
        return 1
    if not sha256:
        print(f"krew: this machine's platform, {own_platform()}, is not supported; choose a --platform", file=sys.stderr)
        return 1
    made = given.output / "finetune.yaml"
    made.write_text(yaml.safe_dump(manifest(given.version, given.url, sha256), sort_keys=False, width=120))
    archives = [given.output / archive_name(given.version, target) for target in sha256 if target.name == own_platform()]
    if archives:
        print(f"try it: kubectl krew install --manifest {made} --archive {archives[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
