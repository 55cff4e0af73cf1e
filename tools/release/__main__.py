"""`python -m tools.release --registry R --version V --key K`: publish a release and print how to verify and install it."""

import argparse
import re
import sys
from pathlib import Path

from finetune_trainer.errors import TrainerError
from finetune_trainer.network.retry import TransientError
from tools.cluster.requirements import ensure_packages
from tools.images import ImageError
from tools.images.__main__ import VALUES, helm_setting
from tools.images.sources import REPOSITORY, SOURCES
from tools.release.publication import Published, Release, source_commit
from tools.release.signing import read_key

_VERSION = re.compile(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?")

_LINK = re.compile(r"[^=\s][^=]*=https?://[^\s]+")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--registry", required=True, help="registry, with a path if needed, such as registry.example/team")
    parser.add_argument("--version", required=True, help="version of images and chart, such as 0.2.0")
    parser.add_argument("--key", required=True, type=Path, help="PEM file with a private key on the curve P-256")
    parser.add_argument("--images", default="all", choices=[*SOURCES, "all"])
    parser.add_argument(
        "--link", action="append", default=[], metavar="NAME=URL", help="link of the chart, such as source=https://git.example/x"
    )
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    given = parser.parse_args()
    if not _VERSION.fullmatch(given.version):
        parser.error(f"--version {given.version}: a version has three numbers, such as 0.2.0 or 0.2.0-rc.1")
    for link in given.link:
        if not _LINK.fullmatch(link):
            parser.error(f"--link {link}: a link is a name and an address, such as source=https://git.example/finetune")
    links = dict(link.split("=", 1) for link in given.link)
    try:
        ensure_packages()
        key = read_key(given.key)
        release = Release(given.registry, given.version, key, source_commit(REPOSITORY), given.plain_http, links)
        images = [release.publish_image(which) for which in (SOURCES if given.images == "all" else [given.images])]
        chart = release.publish_chart(images)
    except (ImageError, TrainerError, TransientError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print(instructions(release, images, chart))
    return 0


def instructions(release: Release, images: list[Published], chart: Published) -> str:
    """Explain how to verify and install the release."""
    public_key = "finetune.pub"
    check = f"--key {public_key} --insecure-ignore-tlog=true"
    lines = [f"# Release {release.version}. The public key, {public_key}:", *release.key.public_key.splitlines(), "# Verify:"]
    for item in (*images, chart):
        lines.append(f"cosign verify {check} {item.reference}@{item.digest}")
        kinds = ("slsaprovenance1",) if item is chart else ("slsaprovenance1", "cyclonedx", "openvex")
        lines += [f"cosign verify-attestation {check} --type {kind} {item.reference}@{item.digest}" for kind in kinds]
    install = f"helm install finetune oci://{chart.reference} --version {release.version}"
    lines += ["# Install:", f"{install} --namespace finetune-system --create-namespace --wait \\"]
    settings = [helm_setting(VALUES[image.reference.rpartition("/")[2]], release.registry, image.digest) for image in images]
    return "\n".join([*lines, " \\\n".join(f"  {setting}" for setting in settings)])


if __name__ == "__main__":
    sys.exit(main())
