"""CPython as Debian packages it, as a directory that runs on any Linux of its architecture.

Debian's signed packages are its source because the images' base comes from there, for each architecture, with security updates.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.images.base import chosen_sources
from tools.images.programs import ImageError, run
from tools.krew.elf import read_program
from tools.krew.platforms import PYTHON, Debian

PACKAGES = (
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *("gcc-12-base", "libbz2-1.0", "libc6", "libexpat1", "libffi8", "libgcc-s1", "liblzma5", "libssl3", "zlib1g"),
)
_UNUSED = {
    *("__phello__", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "tkinter", "turtledemo", "venv"),
    *("curses", "dbm", "distutils", "sqlite3", "turtle.py", "sitecustomize.py"),
}
"""Folders and files of the standard library that only serve people, tests, builds, or what the next line leaves out."""
_UNUSED_EXTENSIONS = (
    "_crypt",
    "_ctypes_test",
    "_curses",
    "_dbm",
    "_sqlite3",
    "_test",
    "_uuid",
    "_xx",
    "nis",
    "ossaudiodev",
    "readline",
    "xx",
)
"""They would bring ncurses, readline, SQLite, Berkeley DB and Kerberos along, or serve tests."""
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PACKAGE_LIST = "debian-packages.txt"


def download(architecture: str, names: Iterable[str], directory: Path) -> list[Path]:
    """Return packages as they are now, or in the snapshot that DEBIAN_SNAPSHOT names, downloaded into a new directory.

    Nothing of this machine's own packages is looked at or changed.

    Raises:
        ImageError: apt is not installed, or failed; it fails for what Debian did not sign.
    """
    state, packages = directory / "apt", directory / "packages"
    packages.mkdir(parents=True)
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "sources.list").write_text(chosen_sources())
    (state / "status").touch()
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Dir::Cache": state / "cache",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Trusted": _KEYRING,
        "Dir::Etc::TrustedParts": "/dev/null",
        "Dir::State": state,
        "Dir::State::Status": state / "status",
    }
    apt = (
        "env",
        f"--chdir={packages}",
        "apt-get",
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
    )
    run(*apt, "--quiet", "update")
    run(*apt, "--quiet", "download", *names)
    return sorted(packages.glob("*.deb"))


def add_interpreter(root: Path, target: Debian, packages: Sequence[Path], library: Path) -> None:
    """Make the new directory `root` with an interpreter, whose packages lie in `library`.

    Raises:
        ImageError: a shared library that the interpreter or `library` loads is in no package, or is for another machine.
    """
    with tempfile.TemporaryDirectory(prefix="debian-") as scratch:
        system = Path(scratch)
        for package in packages:
            run("dpkg-deb", "--extract", package, system)
        (root / "libexec").mkdir(parents=True)
        shutil.copyfile(system / f"usr/bin/python{PYTHON}", root / f"libexec/python{PYTHON}")
        _add_standard_library(root / f"lib/python{PYTHON}", system / f"usr/lib/python{PYTHON}")
        _add_libraries(root, target, system, library)
        described = [_describe(package, system, root / "share/doc") for package in packages]
    about = "# What is in this directory comes from these packages of Debian, unchanged; Debian's archive has their sources.\n"
    (root / _PACKAGE_LIST).write_text(about + "".join(described))
    # Where Debian's module `site` looks: processes that the command line starts as `sys.executable -m` find its packages.
    (root / "lib/python3/dist-packages").mkdir(parents=True)
    (root / "lib/python3/dist-packages/bundle.pth").write_text("../../../../lib\n")


def _add_standard_library(target: Path, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_unused = bool(_UNUSED.intersection(parts)) or parts[0].startswith(("config-", "LICENSE"))
        if not path.is_file() or is_unused or (path.suffix == ".so" and path.name.startswith(_UNUSED_EXTENSIONS)):
            continue
        target.joinpath(*parts[:-1]).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target.joinpath(*parts))


def _add_libraries(root: Path, target: Debian, system: Path, library: Path) -> None:
    """Copy the loader and the shared libraries that programs name, and that these name in turn."""
    found = {
        path.name: path.resolve()
        for folder in (system / "usr/lib" / target.triplet, system / "lib" / target.triplet)
        for path in folder.glob("*.so*")
    }
    brought = {path.name for path in library.rglob("*.so*")}
    waiting = [root / f"libexec/python{PYTHON}", *root.rglob("*.so"), *library.rglob("*.so*")]
    if target.loader not in found:
        raise ImageError(f"there is no {target.loader} in Debian's libc6")
    shutil.copyfile(found[target.loader], root / "lib" / target.loader)
    while waiting:
        path = waiting.pop()
        program = read_program(path)
        if program is None:
            continue
        if program.machine != target.machine:
            raise ImageError(f"{path.name} is for the machine {program.machine} of ELF, and the bundle for {target.machine}")
        for name in program.needed:
            if name in brought or (root / "lib" / name).exists():
                continue
            if name not in found:
                raise ImageError(f"{path.name} loads {name}, which none of these packages of Debian has: {', '.join(PACKAGES)}")
            waiting.append(root / "lib" / name)
            shutil.copyfile(found[name], root / "lib" / name)


def _describe(package: Path, system: Path, documents: Path) -> str:
    """Copy a package's licences; returns its line in the list of packages."""
    name, version = run("dpkg-deb", "--show", "--showformat", "${Package} ${Version}", package).split()
    place = documents / name
    place.mkdir(parents=True)
    shutil.copyfile(system / "usr/share/doc" / name / "copyright", place / "copyright")
    return f"{name} {version}\n"
