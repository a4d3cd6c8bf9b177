"""What a sequence's keys and values cost, and where they lie.

Holds pages, the pools they come from and every count of bytes. Imports torch alone: no model, no schedule, no job.
Bottom to top: user_cache, scorers, config, sizes, quantize, kernels, pages, compress, sequence. `config` and `sizes`
are pure and cheap, the others import torch.
"""
