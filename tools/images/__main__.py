"""`python -m tools.images [trainer|operator|all]` builds images and prints their names.

With `--push REGISTRY` it pushes them there, and prints the options with which helm installs them by digest; `--values FILE`
writes the same as a values file.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.cluster.requirements import ensure_packages
from tools.images import ImageError, build
from tools.images.sources import SOURCES

VALUES = {"finetune-operator": "image", "finetune-trainer": "trainerImage"}
"""Image -> value of the chart that names it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__)
    parser.add_argument("which", nargs="?", default="all", choices=[*SOURCES, "all"])
    parser.add_argument("--push", metavar="REGISTRY", help="registry, with a path if needed, such as registry.example/team")
    parser.add_argument("--plain-http", action="store_true", help="the registry has no TLS")
    parser.add_argument("--values", type=Path, metavar="FILE", help="write the pushed images to FILE, as values of the chart")
    given = parser.parse_args()
    which, values = given.which, {}
    ensure_packages()  # before the threads start, because only one could hold the package manager's lock
    try:
        with ThreadPoolExecutor() as parallel:
            for image in parallel.map(build, SOURCES if which == "all" else [which]):
                if given.push is None:
                    print(f"{image.reference} {image.stored.size / 1e9:.2f} GB", flush=True)
                else:
                    digest = image.push(given.push, plain_http=given.plain_http)
                    values[VALUES[image.name]] = {"registry": given.push, "digest": digest}
                    print(helm_setting(VALUES[image.name], given.push, digest), flush=True)
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    if given.values is not None:
        given.values.parent.mkdir(parents=True, exist_ok=True)
        given.values.write_text(json.dumps(values, indent=2) + "\n")  # JSON is YAML
    return 0


def helm_setting(value: str, registry: str, digest: str) -> str:
    """Return the option with which helm installs an image by digest. `value`: the chart's value for the image."""
    return f"--set {value}.registry={registry},{value}.digest={digest}"


if __name__ == "__main__":
    sys.exit(main())
