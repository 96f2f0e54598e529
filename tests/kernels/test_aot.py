"""Compiling ahead of time, in a process that does not interpret: no GPU is needed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bpkv_trt.errors import ConfigError
from bpkv_trt.kernels.aot import TARGETS, Cubin, compile_all, parse_targets, read_manifest
from bpkv_trt.kernels.configuration import KernelConfiguration

COMPILE = """
import sys
from pathlib import Path
import torch
from bpkv_trt.kernels.aot import compile_all, variants_of
from bpkv_trt.kernels.decode import paged_decode_attention
from bpkv_trt.kernels.launch import recorded
from bpkv_trt.kernels.paged import CacheType, PagedCache

if __name__ == "__main__":
    torch.set_default_device("meta")
    tables, lengths = torch.empty(2, 8, 5, dtype=torch.int32), torch.empty(2, 8, dtype=torch.int32)
    cache = PagedCache(torch.empty(2, dtype=torch.int64), tables, tables, lengths, CacheType.BF16, 32, 64)
    with recorded() as launches:
        for _ in range(2):
            paged_decode_attention(torch.empty(2, 32, 64, dtype=torch.bfloat16), cache, scale=0.125)
    for cubin in compile_all(variants_of(launches), ["80", "90a"], Path(sys.argv[1]), jobs=2):
        print(cubin.file)
"""


def compiled(folder: Path, script: Path) -> list[Cubin]:
    script.write_text(COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder.with_suffix(".cache"))
    run = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    cubins = read_manifest(folder)
    assert sorted(run.stdout.split()) == sorted(cubin.file for cubin in cubins)
    return cubins


@pytest.mark.slow
def test_a_launch_is_compiled_once_for_every_target_and_the_same_again(tmp_path: Path) -> None:
    first = compiled(tmp_path / "first", tmp_path / "compile.py")
    assert [(cubin.name, cubin.target) for cubin in first] == [
        (name, target) for name in ("attend_split", "combine_splits") for target in ("80", "90a")
    ]
    for cubin in first:
        binary = (tmp_path / "first" / cubin.file).read_bytes()
        assert binary.startswith(b"\x7fELF") and hashlib.sha256(binary).hexdigest() == cubin.sha256
        assert str(Path.cwd()).encode() not in binary, "a path of this machine"
        assert cubin.hidden_arguments == 2 and cubin.spilled_bytes == 0 and 0 < cubin.registers <= 255
    split = first[0]
    assert [kind for _, kind in split.arguments[:2]] == ["*bf16", "*i64"] and split.threads == 128
    assert split.constants["D"] == 64 and split.constants["SOFTCAP"] is None
    kept = (tmp_path / "first" / split.file).stat().st_mtime_ns
    assert compiled(tmp_path / "first", tmp_path / "compile.py") == first, "what was there is not compiled again"
    assert (tmp_path / "first" / split.file).stat().st_mtime_ns == kept
    assert compiled(tmp_path / "second", tmp_path / "compile.py") == first, "two compilations differ"


def test_targets_are_read_once_each_and_others_refused() -> None:
    assert parse_targets("90a, sm_80,80") == ["90a", "80"]
    with pytest.raises(ConfigError, match="targets has 75") as refusal:
        parse_targets("80,75")
    assert all(target in str(refusal.value) for target in TARGETS)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1, "cubins": [{}]}'])
def test_a_damaged_manifest_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=r"manifest\.json .*; remove it and compile again\.$"):
        read_manifest(tmp_path)
    assert read_manifest(tmp_path / "absent") == []


def test_a_manifest_says_what_it_is_for_and_files_that_it_does_not_list_stay(tmp_path: Path) -> None:
    (tmp_path / "earlier.cubin").touch()
    assert list(compile_all([], ["80"], tmp_path, 1, KernelConfiguration().document())) == []
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["alignment"] == 16 and manifest["cubins"] == read_manifest(tmp_path) == []
    assert manifest["configuration"] == KernelConfiguration().document()
    assert (tmp_path / "earlier.cubin").exists()
