"""What goes into each image, and the hashes that name it."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.images.base import base_hash

REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the source tree, the context of every build."""

_LAYERS = REPOSITORY / "trainer_image" / "layers"
BILL_OF_MATERIALS = _LAYERS / "sbom.lock"
"""The packages that list what an image holds, while it is built."""

_HASH_DIGITS = 16
_FINAL_STAGE = "\nFROM "
"""Begins a stage; the last one adds our code to the installed dependencies."""


@dataclass(frozen=True)
class Sources:
    """The files that one image is made from."""

    name: str
    """Name of the image."""
    directory: Path
    """Folder of its Containerfile and of its lock."""
    extra: str
    """The optional dependencies, in pyproject.toml, that the image installs."""
    kinds: tuple[str, ...] = ("base",)
    """Of the file systems that the stages of its Containerfile begin with."""

    @property
    def containerfile(self) -> Path:
        return self.directory / "Containerfile"

    @property
    def ignorefile(self) -> Path:
        return self.directory / "Containerfile.dockerignore"

    @property
    def requirements(self) -> Path:
        return self.directory / "requirements.lock"

    @property
    def installer(self) -> Path:
        return _LAYERS / "installer.lock"

    @property
    def locks(self) -> tuple[Path, ...]:
        """All wheels that a build needs."""
        return self.requirements, BILL_OF_MATERIALS, self.installer

    @property
    def wheelhouse_hash(self) -> str:
        """Changes with what has to be downloaded."""
        return _hash(self.locks)

    @property
    def dependencies_hash(self) -> str:
        """Changes with what makes the layers below our code."""
        stages = self.containerfile.read_text(encoding="utf-8").rpartition(_FINAL_STAGE)[0]
        recipe = [path for root in self._context() if not (root / "__init__.py").exists() for path in _files(root)]
        return _hash(recipe, self._bases + stages)

    @property
    def tag(self) -> str:
        """Changes with any file that the build can see."""
        return _hash([self.containerfile, *(path for root in self._context() for path in _files(root))], self._bases)

    @property
    def _bases(self) -> str:
        return "".join(base_hash(kind) for kind in self.kinds)

    def _context(self) -> Iterator[Path]:
        """The files and folders that the ignore file lets into the build."""
        for line in self.ignorefile.read_text(encoding="utf-8").splitlines():
            if line.startswith("!"):
                yield REPOSITORY / line[1:]


SOURCES = {
    "trainer": Sources("finetune-trainer", REPOSITORY / "trainer_image", "trainer", ("base", "compiler")),
    "operator": Sources("finetune-operator", REPOSITORY / "operator", "operator"),
}
"""The images, by the word that picks one of them."""


def _files(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    return sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _hash(files: Iterable[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(REPOSITORY)}\0{path.stat().st_mode & 0o777:o}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:_HASH_DIGITS]
