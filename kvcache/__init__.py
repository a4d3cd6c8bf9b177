"""What a sequence's keys and values cost, and where they lie.

Owns pages, the pool they come from and every count of bytes. Knows torch alone: no model, no schedule, no job.
Import from the modules: `config` and `layout` are pure and cheap, the others import torch.
"""
