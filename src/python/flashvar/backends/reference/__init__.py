"""The reference backend: the ops in plain torch operations, for any device, slow."""

import torch

# The first exponential of a process, on one thread. Where several threads compute it, some shares
# of the result are off by up to 1e-4, in about one process of 50 on a busy machine (torch 2.13,
# which calls MKL). Presumably the threads race to initialize MKL's vector functions.
torch.exp(torch.zeros(1, dtype=torch.float32, device="cpu"))
