"""Writes files durably, so that each has either its old content or all of the new, and reads untrusted files.

Anyone who can write to a claim can put links or pipes there. So one of three rules applies, depending on where a file comes from:
* files that this product wrote itself must not be links (`read_own`, `open_beneath`);
* links in a model or an adapter may lead only to files below its `link_root` (`links_outside`, `open_within`);
* all other files are opened without blocking and must be regular files (`open_regular`).

A check before opening would not help, since the path could change in between; so the open call itself enforces the rule. This
module also lists licence files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath

MANIFEST_FILE = "manifest.json"
"""Name of a result directory's manifest. It records the origin, size and SHA-256 of all other files, and is written last."""
HASHING_THREADS = max(1, min(2, (os.cpu_count() or 1) - 1))
"""Number of threads that hash files. One processor is left for the calling thread."""
HASHED_AT_ONCE = 16 << 20
"""Number of bytes that a hashing thread reads at a time."""
TEMPORARY_MARK = ".tmp-"
"""Part of the names of files and directories that are not complete yet."""
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
TEMPLATES = "additional_chat_templates"
"""Directory of additional chat templates, such as one for tool use, which transformers loads with the tokenizer."""
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    f"{TEMPLATES}/*",
)
"""Glob patterns for the files of a model that determine how text is tokenized."""
CODE_SUFFIX = ".py"
OTHER_LAYOUT = "consolidated"
"""Name prefix of a second copy of the weights, which some repositories hold in the layout of the author's own software."""
_COPY_BYTES = 1 << 20
MOST_OWN_BYTES = 1 << 30
"""Maximum size of a file that this product wrote. The largest are histories, with about 300 bytes per training step."""
LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
"""Upper-case name prefixes of licence files, which are fetched with a model and published with whatever is made from it."""


def temporary_beside(path: Path) -> Path:
    """Return a unique path in the same directory whose name is marked as temporary."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{uuid.uuid4().hex}")


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the file's bytes durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically and durably, replacing any existing file. The directory must exist."""
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Remove `path` if it exists: a directory with everything below it, a file, or a link (but not its target).

    Raises OSError.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a complete directory of durable files to its final name, which must not exist."""
    sync_directory(temporary)
    temporary.rename(final)
    sync_directory(final.parent)


@contextmanager
def replacing_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory, which replaces `final` after the block, or is removed if the block raises.

    The block must make its files durable. Leftovers of killed attempts are removed first.
    """
    for leftover in final.parent.glob(f"{final.name}{TEMPORARY_MARK}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = temporary_beside(final)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        remove_tree(final)
        publish_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class SpecialFileError(OSError):
    """A pipe, socket, device, directory or link is in place of a file. Reading could block, never end, or read another file."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            errno.EINVAL, "is a pipe, a socket, a device, a directory or a link that may not be followed, not a file", str(path)
        )


class OutsideError(OSError):
    """A name or a link leads out of its directory. Nothing was opened."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EXDEV, why, str(path))


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open a user's file for reading, without waiting for a pipe's writer. Raises SpecialFileError, OSError.

    follow: whether `path` itself may be a link.
    """
    return _opened(path, path, None, 0 if follow else os.O_NOFOLLOW)


def open_beneath(root: Path, name: str) -> BufferedReader:
    """Open the file `name`, which may contain slashes, below `root`. No part of it may be a link; `root` itself is trusted.

    Raises OutsideError, SpecialFileError, OSError.
    """
    path, parts = root / name, PurePosixPath(name).parts
    if not parts or not set(parts).isdisjoint(("/", "//", "..")):
        raise OutsideError(path, f"leads out of {root}")
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            try:
                inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            except NotADirectoryError as error:
                raise OutsideError(path, f"{part} on its path is a link, or no directory") from error
            os.close(directory)
            directory = inner
        return _opened(path, parts[-1], directory, os.O_NOFOLLOW)
    finally:
        os.close(directory)


def open_within(path: Path, root: Path) -> BufferedReader:
    """Resolve the links in `path` and open the resulting file if it is below `root`. The open call itself follows no links.

    Raises OutsideError, SpecialFileError, OSError.
    """
    return open_beneath(Path(os.path.realpath(root)), str(inside(path, root)))


def inside(path: Path, root: Path) -> PurePosixPath:
    """Return `path` relative to `root` after resolving all links in both. Raises OutsideError if it is outside `root`."""
    real, real_root = os.path.realpath(path), os.path.realpath(root)
    target = PurePosixPath(real)
    if not target.is_relative_to(real_root):
        raise OutsideError(path, f"is a link to {real}, which is outside {real_root}")
    return target.relative_to(real_root)


def append_to_own(path: Path) -> int:
    """Open or create a file of this product for reading and appending, and return its descriptor. Raises OSError.

    Does not follow a link, and does not wait for a pipe.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def link_root(directory: Path, claim: Path | None = None) -> Path:
    """Return the directory that must contain the targets of all links in a model or an adapter: the mount of its claim.

    Without a claim, this is `directory` itself. For a snapshot in a Hugging Face cache, whose files link to blobs next to the
    snapshots, this is the model's repository in the cache.
    """
    real, own = Path(os.path.realpath(directory)), Path(os.path.realpath(claim or directory))
    snapshots = (path for path in real.parents if path.name == "snapshots" and path.parent.name.startswith("models--"))
    repository = next((path.parent for path in snapshots), own)
    return repository if own.is_relative_to(repository) else own


def links_outside(directory: Path, root: Path) -> Iterator[OutsideError]:
    """Yield an error for each link out of `root`, including `directory` itself. Raises OSError if `directory` cannot be listed.

    This protects libraries, which open every file by its path and follow every link. Only what libraries open is checked: the
    entries of the directory and of its template directory.
    """
    for path in (directory, *sorted(directory.iterdir()), *sorted(directory.glob(f"{TEMPLATES}/*"))):
        try:
            inside(path, root)
        except OutsideError as error:
            yield error


def copy_within(path: Path, root: Path, target: Path) -> None:
    """Copy a file, opened by `open_within`, to `target`, which is replaced if it exists. Raises as `open_within` does."""
    with open_within(path, root) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, _COPY_BYTES)


def read_own(path: Path, most_bytes: int = MOST_OWN_BYTES) -> bytes:
    """Read a file that this product wrote to a claim. Raises SpecialFileError for a link or a special file, and OSError."""
    with open_regular(path, follow=False) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes} bytes, the most that such a file can have", str(path))
    return content


def _opened(path: Path, name: Path | str, directory: int | None, flags: int) -> BufferedReader:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):
            raise SpecialFileError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SpecialFileError(path)
    return os.fdopen(descriptor, "rb")


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes, in hexadecimal. Raises SpecialFileError, OSError."""
    with open_regular(path) as file:
        return _sha256(file)


def sha256_beneath(root: Path, name: str) -> str:
    """SHA-256 of the bytes of a file that this product wrote. Raises as `open_beneath` does."""
    with open_beneath(root, name) as file:
        return _sha256(file)


def _sha256(file: BufferedReader) -> str:
    """SHA-256 of the bytes of an open file, in hexadecimal.

    `hashlib.file_digest` would be slow while another thread imports: after each block, which takes 0.2 ms, it would wait up to
    5 ms for the GIL.
    """
    if hasattr(os, "posix_fadvise"):  # lets the disk read further ahead: 2.2 GB in 1.9 s instead of 3.4
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    digest = hashlib.sha256()
    block = memoryview(bytearray(max(1, min(HASHED_AT_ONCE, os.fstat(file.fileno()).st_size))))
    while count := file.readinto(block):
        digest.update(block[:count])
    return digest.hexdigest()


class FileDigests:
    """Computes SHA-256 of files in a few threads, which release the GIL while they hash."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(HASHING_THREADS)
        self._digests: dict[Path, Future[str]] = {}

    def begin(self, paths: Iterable[Path]) -> None:
        """Start hashing complete files, whose digests `of` will return."""
        for path in paths:
            if path not in self._digests:
                self._digests[path] = self._threads.submit(file_sha256, path)

    def of(self, path: Path) -> str:
        """Return the digest of a file, which is computed only once for each path. Raises as `file_sha256` does."""
        self.begin([path])
        return self._digests[path].result()


def tokenizer_files(model: Path) -> list[Path]:
    """List the files in a model's directory that match TOKENIZER_PATTERNS."""
    return sorted({path for pattern in TOKENIZER_PATTERNS for path in model.glob(pattern) if path.is_file()})


def licence_files(model: Path) -> list[Path]:
    """List the licence files in a model's directory."""
    return sorted(path for path in model.iterdir() if path.is_file() and path.name.upper().startswith(LICENCE_NAMES))
