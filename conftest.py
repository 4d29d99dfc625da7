"""Without a GPU, every kernel runs in Triton's interpreter; it must be chosen before the first kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
