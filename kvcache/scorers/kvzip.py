"""KVzip: the largest attention a key receives while the model repeats what it read (Kim et al. 2025).

The keys that the model needs to repeat its text also answer any question about the text, so the question need not be
known. The original repeats the whole context after reading it; here each chunk is repeated just before it is scored.
Either way costs about one more prefill.
"""

from kvcache.scorers.attention_max import AttentionMax


class KVzip(AttentionMax):
    """Score by the largest attention received from the reconstruction, at any distance."""

    reconstructs = True
    distance = 0
