"""The platforms for which archives are built."""

from __future__ import annotations

import platform
from dataclasses import dataclass

PYTHON = "3.11"


@dataclass(frozen=True)
class Debian:
    """Properties of Debian's packages for an architecture."""

    triplet: str
    """Name of the directory of their shared libraries."""
    loader: str
    """The shared library that starts dynamically linked programs."""
    machine: int
    """Machine that their programs are built for: `e_machine` of ELF."""


@dataclass(frozen=True)
class Platform:
    """A platform, as Krew names it."""

    os: str
    arch: str
    """Name of the architecture; Debian uses the same."""
    wheels: str
    """Name of the platform for uv."""
    debian: Debian | None = None
    """Debian's packages with the interpreter; None if the machine must have one."""

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
    """Name of this machine's platform, which may not be supported."""
    machine = platform.machine()
    return f"{platform.system().lower()}-{_ARCHITECTURES.get(machine, machine)}"
