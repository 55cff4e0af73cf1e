"""The sources of each image, and the hashes by which it is named."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.images.base import base_hash

REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the source tree, which is the context of every build."""

_LAYERS = REPOSITORY / "trainer_image" / "layers"
BILL_OF_MATERIALS = _LAYERS / "sbom.lock"
"""Lock of the packages that write an image's bill of materials during its build."""

_HASH_DIGITS = 16
_FINAL_STAGE = "\nFROM "
"""Text that begins a stage; the last stage adds our code to the installed dependencies."""


@dataclass(frozen=True)
class Sources:
    """The files that one image is made from."""

    name: str
    """Name of the image."""
    directory: Path
    """Folder of its Containerfile and its lock."""
    extra: str
    """The extra of pyproject.toml whose dependencies the image installs."""
    kinds: tuple[str, ...] = ("base",)
    """Kinds of the base images with which the stages of its Containerfile begin."""

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
        """Locks of all wheels that a build needs."""
        return self.requirements, BILL_OF_MATERIALS, self.installer

    @property
    def wheelhouse_hash(self) -> str:
        """Hash of the wheels to download."""
        return _hash(self.locks)

    @property
    def dependencies_hash(self) -> str:
        """Hash of the sources of the layers below our code."""
        stages = self.containerfile.read_text(encoding="utf-8").rpartition(_FINAL_STAGE)[0]
        recipe = [path for root in self._context() if not (root / "__init__.py").exists() for path in _files(root)]
        return _hash(recipe, self._bases + stages)

    @property
    def tag(self) -> str:
        """Hash of all files that the build can see."""
        return _hash([self.containerfile, *(path for root in self._context() for path in _files(root))], self._bases)

    @property
    def _bases(self) -> str:
        return "".join(base_hash(kind) for kind in self.kinds)

    def _context(self) -> Iterator[Path]:
        """Yield the files and folders that the ignore file admits to the build."""
        for line in self.ignorefile.read_text(encoding="utf-8").splitlines():
            if line.startswith("!"):
                yield REPOSITORY / line[1:]


SOURCES = {
    "trainer": Sources("finetune-trainer", REPOSITORY / "trainer_image", "trainer", ("base", "compiler")),
    "operator": Sources("finetune-operator", REPOSITORY / "operator", "operator"),
}
"""The images by their short names."""


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
