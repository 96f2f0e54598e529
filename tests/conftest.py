import os
import subprocess
import sys
from pathlib import Path

import pytest

# Kernels run in Triton's interpreter, which has to be known before anything imports Triton, as transformers does.
os.environ.setdefault("TRITON_INTERPRET", "1")  # 0: the tests of kernels on a GPU


@pytest.fixture(scope="session")
def tritonserver() -> Path:
    """The folder of the command `tritonserver`; the tests that need it are skipped where it cannot be had."""
    script = Path(__file__).parents[1] / "build_scripts" / "triton_environment.py"
    made = subprocess.run([sys.executable, script], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    return Path(made.stdout.strip()).parent
