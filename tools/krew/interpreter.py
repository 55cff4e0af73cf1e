"""Builds a directory with Debian's CPython that runs on any Linux of its architecture.

The images are based on Debian's signed packages too. They exist for each architecture, with security updates.
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
"""Folders and files of the standard library that only people, tests, builds or _UNUSED_EXTENSIONS need."""
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
"""Extension modules that need ncurses, readline, SQLite, Berkeley DB or Kerberos, or that only tests use."""
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PACKAGE_LIST = "debian-packages.txt"


def download(architecture: str, names: Iterable[str], directory: Path) -> list[Path]:
    """Download current packages, or those of the snapshot that DEBIAN_SNAPSHOT names, into a new directory.

    This machine's own packages are neither read nor changed.

    Raises:
        ImageError: apt is not installed or failed, for example because Debian did not sign a package.
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
    """Create the directory `root` with an interpreter for the Python packages in `library`.

    Raises:
        ImageError: a shared library that the interpreter or `library` needs is in no package, or is for another machine.
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
    about = "# The files in this directory are unchanged files of these Debian packages; Debian's archive has their sources.\n"
    (root / _PACKAGE_LIST).write_text(about + "".join(described))
    # Debian's module `site` looks here, so processes that the command line starts with `sys.executable -m` find its packages.
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
    """Copy the loader and all shared libraries that programs need, directly or indirectly."""
    available = {
        path.name: path.resolve()
        for folder in (system / "usr/lib" / target.triplet, system / "lib" / target.triplet)
        for path in folder.glob("*.so*")
    }
    in_library = {path.name for path in library.rglob("*.so*")}
    waiting = [root / f"libexec/python{PYTHON}", *root.rglob("*.so"), *library.rglob("*.so*")]
    if target.loader not in available:
        raise ImageError(f"Debian's libc6 does not contain {target.loader}")
    shutil.copyfile(available[target.loader], root / "lib" / target.loader)
    while waiting:
        path = waiting.pop()
        program = read_program(path)
        if program is None:
            continue
        if program.machine != target.machine:
            raise ImageError(f"{path.name} is for the ELF machine {program.machine}, but the bundle is for {target.machine}")
        for name in program.needed:
            if name in in_library or (root / "lib" / name).exists():
                continue
            if name not in available:
                raise ImageError(f"{path.name} needs {name}, which is in none of these Debian packages: {', '.join(PACKAGES)}")
            waiting.append(root / "lib" / name)
            shutil.copyfile(available[name], root / "lib" / name)


def _describe(package: Path, system: Path, documents: Path) -> str:
    """Copy a package's licences. Returns its line in the list of packages."""
    name, version = run("dpkg-deb", "--show", "--showformat", "${Package} ${Version}", package).split()
    place = documents / name
    place.mkdir(parents=True)
    shutil.copyfile(system / "usr/share/doc" / name / "copyright", place / "copyright")
    return f"{name} {version}\n"
