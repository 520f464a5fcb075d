"""Which kernels of the results have other sources than then, and the same machine code: ``same_code.py COMMIT``.

The sources of that commit and today's are compiled with the same options by the NVRTC that is installed, for the card
of the results; no GPU is needed. Figures of a kernel whose instructions are the same stay valid: the tables do not mark
them. What was found is added to bench/publish/same_code.json.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bsrgemm._benchmark import machine_code
from bsrgemm._cli.compile import specs
from bsrgemm._kernels import jit
from bsrgemm._kernels.sources import code_digest, gather
from bsrgemm.dtypes import DEVICE_DTYPES

ROOT = Path(__file__).resolve().parents[2]
#: The target of the results, and the digits of a digest that they keep
ARCH, DIGITS = "sm_90a", 16


def kernels_of_results() -> Iterator[tuple[str, str]]:
    """The name of each kernel in the files of results, and the digest of its sources at that time."""
    found: dict[tuple[str, str], None] = {}
    for file in sorted((ROOT / "bench" / "results").glob("*.json")):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            found |= dict.fromkeys(row.get("kernels", {}).items())
    yield from found


def sources_of(commit: str, folder: Path) -> Path:
    """Write the folder cuda of a commit into another folder, and return its place."""
    packed = subprocess.run(["git", "archive", commit, "cuda"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "cuda"


def digest(source: str, root: Path) -> str | None:
    """The digest of a source in a folder; None where it is not there."""
    try:
        return code_digest(gather(source, root))[:DIGITS]
    except FileNotFoundError:
        return None


def code(spec: jit.KernelSpec, root: Path) -> str | None:
    """A digest of the machine code of a kernel; None where these sources refuse today's options."""
    try:
        return machine_code.code_of(jit.compile_cubin(spec, ARCH, root=root).cubin)
    except jit.CompileError:
        return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="whose sources are compared with those of the checkout")
    commit = parser.parse_args(argv).commit
    known = {str(spec): spec for spec in specs([str(dtype) for dtype in DEVICE_DTYPES], every=True, arch=ARCH)}
    file = machine_code.FILE
    written = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"kernels": {}}
    with tempfile.TemporaryDirectory() as folder:
        old, new = sources_of(commit, Path(folder)), ROOT / "cuda"
        for name, measured in kernels_of_results():
            source = name.partition(":")[0]
            then, now = digest(source, old), digest(source, new)
            if then is None or now is None or then == now or not machine_code.same(name, measured, then):
                continue
            if name not in known:
                print(f"not made any more: {name}")
                continue
            before, after = (code(known[name], root) for root in (old, new))
            equal = before == after
            print(f"{'the same' if equal else 'other'}: {name}", flush=True)
            if equal:
                groups = written["kernels"].get(name, [])
                written["kernels"][name] = machine_code.joined(groups, then, now)
    written |= {"nvrtc": jit.nvrtc_version(), "arch": ARCH}
    file.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
