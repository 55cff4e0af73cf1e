"""`python -m tests.support.images [trainer|operator|all]` builds images and prints their names."""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.support.cluster.requirements import ensure_packages
from tests.support.images import ImageError, build
from tests.support.images.sources import SOURCES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.images", description=__doc__)
    parser.add_argument("which", nargs="?", default="all", choices=[*SOURCES, "all"])
    which = parser.parse_args().which
    ensure_packages()  # before the threads, of which only one could hold the package manager's lock
    try:
        with ThreadPoolExecutor() as parallel:
            for image in parallel.map(build, SOURCES if which == "all" else [which]):
                print(f"{image.reference} {image.stored.size / 1e9:.2f} GB", flush=True)
    except ImageError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
