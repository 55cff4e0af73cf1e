"""The platforms that there are archives for."""

from __future__ import annotations

import platform
from dataclasses import dataclass

PYTHON = "3.11"


@dataclass(frozen=True)
class Debian:
    """What Debian's packages for an architecture look like inside."""

    triplet: str
    """Names the directory of their shared libraries."""
    loader: str
    """The file among these that starts dynamic programs."""
    machine: int
    """What their programs say they are made for: `e_machine` of ELF."""


@dataclass(frozen=True)
class Platform:
    """One that Krew names."""

    os: str
    arch: str
    """Debian has the same word for it."""
    wheels: str
    """What uv calls it."""
    debian: Debian | None = None
    """Where the interpreter comes from; None: from the machine."""

    @property
    def name(self) -> str:
        return f"{self.os}-{self.arch}"


_X86_64 = Debian("x86_64-linux-gnu", "ld-linux-x86-64.so.2", 62)
_AARCH64 = Debian("aarch64-linux-gnu", "ld-linux-aarch64.so.1", 183)
PLATFORMS = (
    Platform("linux", "amd64", "x86_64-manylinux_2_28", _X86_64),
    Platform("linux", "arm64", "aarch64-manylinux_2_28", _AARCH64),
    Platform("darwin", "amd64", "x86_64-apple-darwin"),
    Platform("darwin", "arm64", "aarch64-apple-darwin"),
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def own_platform() -> str:
    """Name of this machine's."""
    machine = platform.machine()
    return f"{platform.system().lower()}-{_ARCHITECTURES.get(machine, machine)}"
