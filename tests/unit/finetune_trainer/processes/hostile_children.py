"""What a child does that a user's file has taken over: to everything that it can write to and its parent reads."""

import fcntl
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self._path,)


def garbage(descriptor: int, trap: Path) -> None:
    """A pickle, with a length before it as multiprocessing writes it, and without."""
    made = pickle.dumps(Trap(trap))
    os.write(descriptor, made + b"\n" + len(made).to_bytes(4, "big") + made + b"\n")
    os._exit(0)


def without_end(descriptor: int, _trap: Path) -> None:
    """A line that never ends."""
    while True:
        os.write(descriptor, b"[" * 65536)


def never(_descriptor: int, _trap: Path) -> None:
    """Nothing, and no end."""
    time.sleep(3600)


def closed(descriptor: int, _trap: Path) -> None:
    """Closes what it should write to, and lives on."""
    os.close(descriptor)
    time.sleep(3600)


BEHAVIOURS: dict[str, Callable[[int, Path], None]] = {each.__name__: each for each in (garbage, without_end, never, closed)}


def opened() -> set[str]:
    """Pipes and sockets of this process."""
    return {link for link in map(_link, _descriptors()) if link.startswith(("pipe:", "socket:"))}


def taken_over(behaviour: str, before: set[str], trap: Path) -> None:
    """In a child: behave like that towards what was opened since `before`, the pipes and sockets of then."""
    new = [each for each in _descriptors() if _link(each) in opened() - before]
    (writing,) = [each for each in new if fcntl.fcntl(each, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)]
    BEHAVIOURS[behaviour](writing, trap)


def _descriptors() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def _link(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
