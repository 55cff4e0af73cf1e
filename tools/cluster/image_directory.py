"""Where the nodes' container runtimes keep their images, and how a further node gets those of the first without a copy.

An image of six gigabytes takes minutes to import and as much disk again. What a runtime has once unpacked it never writes to, so
two nodes may have the very same files: each has links of its own, and only the databases, which do change, are copied.
"""

import shutil
from pathlib import Path

from tools.cluster.cache import cache_root
from tools.cluster.network import NodeNetwork
from tools.cluster.processes import run_command

_CONTENT = "io.containerd.content.v1.content/blobs"
_SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs"
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", f"{_SNAPSHOTS}/metadata.db")


def node_root(place: NodeNetwork) -> Path:
    """Return the directory of a node's container runtime.

    The first node's is kept between runs; deleting it costs only a new import.
    """
    return cache_root() / ("node-root" if place.number == 1 else f"node-root-{place.number}") / "containerd"


def link_images(source: Path, target: Path) -> None:
    """Give the runtime at `target` the images of the one at `source`, which must stand still meanwhile.

    What was at `target` is gone afterwards. Both must be on one file system.
    """
    shutil.rmtree(target, ignore_errors=True)
    for linked in (_CONTENT, f"{_SNAPSHOTS}/snapshots"):
        (target / linked).parent.mkdir(parents=True, exist_ok=True)
        run_command("cp", "--archive", "--link", source / linked, target / linked)
    for database in _DATABASES:
        (target / database).parent.mkdir(parents=True, exist_ok=True)
        run_command("cp", "--archive", source / database, target / database)
