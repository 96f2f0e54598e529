import os

# Kernels run in Triton's interpreter, which has to be known before anything imports Triton, as transformers does; 0 runs
# their tests on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
