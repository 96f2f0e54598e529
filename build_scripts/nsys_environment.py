"""Unpack Nsight Systems' command line from Debian's non-free component into a folder, for machines without a GPU.

    python build_scripts/nsys_environment.py --output DIR     # by hand, on Debian 12; then PATH=DIR:$PATH

It is NVIDIA's, under NVIDIA's licence: read that first (DIR/root/usr/share/doc/nsight-systems/copyright). Nothing here
needs it, no test runs it, and what it unpacks is never committed. Nothing outside of DIR is changed: packages are not
installed. Version 2022.4 sees ranges of Python only with nvtx 0.2.11, which is put into DIR/nvtx (PYTHONPATH=DIR/nvtx).
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
PACKAGES = ("nsight-systems", "nsight-systems-target")
NVTX = "nvtx==0.2.11"
LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
PROGRAMS = Path("usr/lib/nsight-systems")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    folder = parser.parse_args().output.resolve()
    if not SOURCES.is_file():
        sys.exit(f"{SOURCES} is missing: this is for Debian 12. Elsewhere install Nsight Systems as NVIDIA says.")
    root = folder / "root"
    root.mkdir(parents=True, exist_ok=True)
    for archive in download(folder / "apt"):
        run("dpkg", "-x", str(archive), str(root))
    link(root)
    program = launcher(folder, root)
    run(sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--upgrade", "--target", str(folder / "nvtx"), NVTX)
    run(str(program), "--version")


def download(folder: Path) -> list[Path]:
    """The packages' archives, from the mirror that apt already uses, by lists of our own."""
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = re.sub(r"^Components:.*", "Components: non-free", SOURCES.read_text(), flags=re.MULTILINE)
    (folder / "sources" / "non-free.sources").write_text(sources)
    ours = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": folder / "sources",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
    }
    options = [part for name, value in ours.items() for part in ("-o", f"{name}={value}")]
    run("apt-get", *options, "-qq", "update")
    run("apt-get", *options, "-qq", "download", *PACKAGES, folder=folder)
    run("apt-get", "-qq", "download", "libssh-4", folder=folder)
    return sorted(folder.glob("*.deb"))


def link(root: Path) -> None:
    """What its importer looks for by other names than the packages have."""
    for name, target in (
        (root / LIBRARIES / "libssh.so", Path("libssh.so.4")),
        (root / LIBRARIES / "nsight-systems" / "host-linux-x64", root / PROGRAMS / "host-linux-x64"),
    ):
        name.unlink(missing_ok=True)
        name.symlink_to(target)


def launcher(folder: Path, root: Path) -> Path:
    """A command `nsys` that finds the libraries beside it."""
    program = folder / "nsys"
    program.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH="{root / LIBRARIES}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
        f'exec "{root / PROGRAMS / "bin" / "nsys"}" "$@"\n'
    )
    os.chmod(program, 0o755)
    return program


def run(*command: str, folder: Path | None = None) -> None:
    if subprocess.run(command, cwd=folder).returncode:
        sys.exit(f"`{' '.join(command)}` failed, see above.")


if __name__ == "__main__":
    main()
