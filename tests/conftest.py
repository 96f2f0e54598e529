import os

# Kernels run in Triton's interpreter, which has to be known before anything imports Triton, as transformers does.
os.environ.setdefault("TRITON_INTERPRET", "1")  # 0: the tests of kernels on a GPU
