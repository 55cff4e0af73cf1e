"""Copy of a system what its Python programs need at run time, and nothing else: no shell, no package manager, no tools.

Usage: copy_runtime.py ROOT

ROOT is a new directory. It gets the interpreter that runs this script with its standard library, tini, the shared libraries
that these and /opt/finetune/venv load, root certificates, the names of users and of the system, and the directories that a
container runtime mounts over. On Debian, the list of installed packages is reduced to those of which a file was copied, because
scanners for vulnerabilities read it, and their licences are copied.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

VENV = Path("/opt/finetune/venv")
DPKG = Path("/var/lib/dpkg")
FILES = (
    *("/etc/group", "/etc/ld.so.cache", "/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd"),
    *("/etc/ssl/openssl.cnf", "/usr/lib/ssl/cert.pem", "/usr/lib/ssl/certs", "/usr/lib/ssl/openssl.cnf"),
)
FOLDERS = ("/etc/ssl/certs", "/usr/lib/locale/C.utf8")
MOUNTED_OVER = {"dev": 0o755, "proc": 0o755, "run": 0o755, "sys": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}
FOR_PEOPLE_AND_TESTS = {"idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo"}
PACKAGES = {"dist-packages", "ensurepip", "site-packages"}
# For terminals and old directories: they would bring ncurses, readline, Berkeley DB and Kerberos into the image.
EXTENSIONS_LEFT_OUT = ("_curses", "_curses_panel", "_dbm", "nis", "readline")
LIBRARY = re.compile(r"(/\S+) \(0x")


def walk(folder: Path) -> Iterator[Path]:
    """Every file and link below a folder, in one order."""
    for directory, folders, files in os.walk(folder):
        folders.sort()
        yield from sorted(Path(directory, name) for name in files)
        yield from (Path(directory, name) for name in folders if Path(directory, name).is_symlink())


def standard_library() -> Iterator[Path]:
    """Files of the interpreter's own modules, without those that only serve people and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in walk(root):
        unwanted = path.suffix == ".pyc" or (FOR_PEOPLE_AND_TESTS | PACKAGES).intersection(path.relative_to(root).parts)
        if not unwanted and not (path.suffix == ".so" and path.name.partition(".")[0] in EXTENSIONS_LEFT_OUT):
            yield path


def loaded_by(programs: list[Path]) -> Iterator[Path]:
    """The shared libraries, and the loader, that programs and extension modules name."""
    for program in programs:
        # Fails for a file that is no dynamic program: nothing to add.
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        yield from (Path(found) for found in LIBRARY.findall(listed.stdout))


def chain(path: Path) -> Iterator[Path]:
    """A path and, while it is a link, what it points to; folders above it resolved."""
    for _ in range(40):
        path = path.parent.resolve() / path.name
        yield path
        if not path.is_symlink():
            return
        path = path.parent / path.readlink()
    raise SystemExit(f"{path} is a link that leads in a circle")


def copy(paths: Iterator[Path], root: Path) -> set[Path]:
    """Copy files and links, and what links point to. Returns what was copied, as absolute paths of the system."""
    copied: set[Path] = set()
    for asked in paths:
        for path in chain(asked):
            if path in copied or not os.path.lexists(path):
                continue
            target = root / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                target.mkdir(exist_ok=True)
            else:
                shutil.copy2(path, target, follow_symlinks=False)
            copied.add(path)
    return copied


def owners(copied: set[Path]) -> set[str]:
    """Names of the Debian packages that brought any of these files."""
    found = set()
    for listing in sorted((DPKG / "info").glob("*.list")):
        for line in listing.read_text(encoding="utf-8").splitlines():
            path = Path(line)
            if path.parent.resolve() / path.name in copied and not path.is_dir():
                found.add(listing.stem.partition(":")[0])
                break
    return found


def copy_package_list(packages: set[str], root: Path) -> None:
    """Write the reduced list of installed packages."""
    kept = []
    for paragraph in (DPKG / "status").read_text(encoding="utf-8").split("\n\n"):
        name = re.match(r"Package: (\S+)", paragraph)
        if name and name[1] in packages:
            kept.append(paragraph.strip("\n") + "\n")
    target = root / DPKG.relative_to("/") / "status"
    target.parent.mkdir(parents=True)
    target.write_text("\n".join(kept), encoding="utf-8")


def main(target: str) -> None:
    """Make the directory."""
    root = Path(target)
    root.mkdir()
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink():  # into /usr, and programs name files through it
            (root / Path("/", name).readlink()).mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(Path("/", name).readlink())
    tini = shutil.which("tini")
    if tini is None:
        sys.exit("the base has no tini on PATH: use an image with Python 3.11 and tini")
    programs = [Path(os.path.realpath(sys.executable)), Path(tini)]
    modules = list(standard_library())
    libraries = [path for path in (*modules, *walk(VENV)) if ".so" in path.suffixes and not path.is_symlink()]
    interpreter_links = list(chain(Path(shutil.which("python3.11") or sys.executable)))
    data = [Path(name) for name in FILES] + [path for name in FOLDERS for path in walk(Path(name))]
    copied = copy(iter([*programs, *interpreter_links, *modules, *loaded_by(programs + libraries), *data]), root)
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", root, "-p", "/"]
    subprocess.run([*compiled, f"{root}{sysconfig.get_path('stdlib')}"], check=True)
    if (DPKG / "status").exists():
        packages = owners(copied)
        copy_package_list(packages, root)
        copy((Path("/usr/share/doc", name, "copyright") for name in sorted(packages)), root)
    for name, mode in MOUNTED_OVER.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)


if __name__ == "__main__":
    main(*sys.argv[1:])
