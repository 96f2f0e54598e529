"""`python -m bpkv_trt` is `bpkv`."""

import sys

from bpkv_trt.cli import main

if __name__ == "__main__":
    sys.exit(main())
