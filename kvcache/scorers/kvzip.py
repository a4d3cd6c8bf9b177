"""KVzip: the largest attention a key receives while the model repeats what it read (Kim et al. 2025).

What the model needs to write its text again answers any question about it, so none has to be known. The original reads
the whole context and then repeats it; a chunk can as well be repeated just before it is judged. Either way it costs
about one more prefill.
"""

from kvcache.scorers.attention_max import AttentionMax


class KVzip(AttentionMax):
    """Score by the largest attention received from the reconstruction, at any distance."""

    distance = 0
    reconstructs = True
