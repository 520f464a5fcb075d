"""Which sources belong to a room, and which tests can notice an error in it.

Paths that do not exist are left out, so that a room may be named before it is built. An error in a kernel counts as
noticed only if a test fails that executes the kernel: compiling it, hashing it or comparing it with a record is no
proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Room:
    """Sources by pattern, and the files and folders of tests, the likely ones first."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    #: patterns of sources in which no error is made
    without: tuple[str, ...] = ()

    def files(self, root: Path) -> list[str]:
        """The sources, as paths from the root."""
        found = {p for pattern in self.sources for p in root.glob(pattern) if p.is_file()}
        left_out = {p for pattern in self.without for p in root.glob(pattern)}
        return sorted(str(p.relative_to(root)) for p in found - left_out if p.name != "__init__.py")

    def test_files(self, root: Path) -> list[str]:
        """The tests, as paths from the root, doctests of the room's own sources included."""
        found: dict[str, None] = {}
        for name in self.tests:
            path = root / name
            paths = sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.is_file() else []
            found.update(dict.fromkeys(str(p.relative_to(root)) for p in paths))
        doctests = [
            f for f in self.files(root) if f.endswith(".py") and ">>> " in (root / f).read_text(encoding="utf-8")
        ]
        return [name for name in (*doctests, *found) if not name.startswith(NEVER)]


#: Tests that compile, hash or read the sources without executing them, or that need a card.
NEVER = ("tests/kernels/test_compile.py", "tests/record/", "tests/gpu/", "tests/mutation/")

_EMULATOR = "tests/emulator"
ROOMS = {
    room.name: room
    for room in (
        Room("array", ("bsrgemm/_array/*.py", "bsrgemm/bsr.py"), ("tests/array", "tests/scipy_suite")),
        Room(
            "backend",
            ("bsrgemm/_backend/*.py",),
            (
                "tests/products",
                "tests/array",
                "tests/attention",
                "tests/scipy_suite",
                "tests/tools/test_fake_device.py",
            ),
        ),
        Room("dtypes", ("bsrgemm/dtypes.py",), ("tests/products", "tests/array", "tests/attention", "tests/kernels")),
        Room("plotting", ("bsrgemm/_plotting/*.py",), ("tests/array/test_spy.py", "tests/plotting", "tests/attention")),
        Room(
            "products",
            ("bsrgemm/_products/*.py", "bsrgemm/_pullbacks.py"),
            ("tests/products", "tests/kernels", "tests/array", _EMULATOR),
        ),
        Room(
            "attention", ("bsrgemm/_attention/*.py",), ("tests/attention", "tests/kernels", "tests/products", _EMULATOR)
        ),
        Room("kernels", ("bsrgemm/_kernels/*.py",), ("tests/kernels", "tests/products", _EMULATOR)),
        Room(
            "linalg",
            ("bsrgemm/linalg/*.py", "bsrgemm/_batch.py"),
            ("tests/linalg", "tests/interop/test_mpi_solvers.py"),
        ),
        Room("interop", ("bsrgemm/interop/**/*.py",), ("tests/interop",)),
        # Headers with instructions of the card are exchanged on the emulator, so an error in them is never executed.
        Room(
            "cuda",
            ("cuda/**/*.cu", "cuda/**/*.cuh"),
            (_EMULATOR,),
            ("cuda/ptx/*", "cuda/**/tma.cuh", "cuda/**/wgmma.cuh", "cuda/**/mma.cuh"),
        ),
    )
}
#: Sources in which no error is made: what people run and read, and what reports on a machine.
OUTSIDE = ("bsrgemm/_cli/*", "bsrgemm/_environment.py", "bsrgemm/_version.py")
OUTSIDE += ("bsrgemm/__main__.py", "*/__init__.py", "cuda/ptx/*")


def room_of(root: Path, file: str) -> Room | None:
    """The room to which a source belongs."""
    return next((room for room in ROOMS.values() if file in room.files(root)), None)
