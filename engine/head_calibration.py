"""How many tokens each lane of a model needs, measured while the model reads a text twice.

In the second reading, heads that copy attend to the tokens of the first one after the other. The largest attention that
a token receives is KVzip's score (Kim et al. 2025). How the scores divide over layers and heads is a property of the
model, so it is measured once, on words without meaning, and stored in the user's cache folder.
"""

import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from kvcache.compress.lane_shares import STEPS, LaneShares
from kvcache.kernels.protocol import PrefillOptions
from kvcache.kernels.registry import kernels_for
from kvcache.sizes.page_format import PageFormat
from kvcache.user_cache import user_cache

NUM_TOKENS = 1000
_CHUNK_TOKENS = 250
_SINKS = 16  # first tokens, which receive attention whatever they say
_WORDS = """
    about account after again agreement all amount and answer any archive article as at average balance batch because
    before begin between block board both bridge build by call cause certain change chapter city claim clear close code
    column common company condition contract copy cost count country court customer date day decide degree delay deliver
    describe detail device different direct document door during each early east effect either else empty end engine
    enough enter error even event every example expect fail far field file final find first five follow for force form
    forward found from full garden general give glass go gold great green ground group grow half hand hard have head
    heat help here high hold home hour house how however hundred idea if in increase index inside instead into invoice
    iron island item join just keep key kind king know lake land large last late law leave left length less letter level
    light line list little local long lower machine main make many market matter may measure member memory method middle
    might mile mind minute model money month more morning most mountain move much must name near need network never new
    next night none north not note notice number object of off office often old on once one only open or order other our
    out over own page paper part party pass past pay people per period place plain plan point port power present press
    price problem process product program proof public put quarter question queue quick quiet rain range rate rather
    reach read reason receive record red region remain repeat report request rest result return right river road room
    round row rule run same school sea second section see send sentence server service set seven shall share ship short
    show side signal silver simple since six size small so some son south space stand start state station step still
    stone stop store storm story street strong such summer supply sure system table take task tell ten term test than
    that the their then there these they thing third this those thousand three through time to today together too top
    total toward town trade train tree true turn two type under unit until up upon use value very village voice volume
    wait wall warm warning watch water way week well west what wheel when where which while white whole wide will wind
    window winter with within without wood word work world would write year yellow yes yet young zero
""".split()  # noqa: SIM905


def calibration_text() -> str:
    """Return the text to calibrate on: common words in random order, which only copying can predict."""
    return " ".join(random.Random(0).choices(_WORDS, k=NUM_TOKENS))


def calibrate(model: Decoder, token_ids: Tokens[int] = ()) -> LaneShares:
    """Return the share of tokens that each lane needs, from the user's cache folder if the model was measured before.

    Args:
        token_ids: `calibration_text`, tokenized. If empty, the model reads random tokens, which is a little less
            accurate.
    """
    tokens = list(token_ids) or random.Random(0).choices(range(model.config.vocab_size), k=NUM_TOKENS)
    tokens = tokens[: min(NUM_TOKENS, model.config.max_context // 2)]
    name = f"{_fingerprint(model, tokens)}.pt"
    config = model.config
    shape = (STEPS + 1, config.num_layers, config.num_kv_heads)
    try:
        table = torch.load(user_cache() / "calibration" / name, map_location="cpu", weights_only=True)
        if table.shape == shape:
            return LaneShares(table)
    except Exception:  # torch.load may raise anything for a damaged file, and measuring again is always right
        pass
    shares = LaneShares.from_scores(_scores(model, tokens)[..., min(_SINKS, len(tokens) // 4) :])
    _store(shares.table, name)
    return shares


@torch.inference_mode()
def _scores(model: Decoder, tokens: list[int]) -> Tensor:
    """Return the largest attention each token receives when the text is read again, `[L, KVH, N]`."""
    config, num_tokens = model.config, len(tokens)
    twice = torch.tensor(tokens * 2, device=model.device)
    shape = (config.num_layers, config.num_kv_heads, len(twice), config.head_dim)
    keys, values = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    scores = torch.zeros(config.num_layers, config.num_kv_heads, num_tokens, device=model.device)
    kernels = kernels_for(model.device, PageFormat(16, 16, 16, config.head_dim))
    # No chunk spans both readings.
    starts = [*range(0, num_tokens, _CHUNK_TOKENS), *range(num_tokens, len(twice), _CHUNK_TOKENS)]
    for start, end in zip(starts, [*starts[1:], len(twice)], strict=True):

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, start: int = start, end: int = end) -> Tensor:
            keys[layer, :, start:end], values[layer, :, start:end] = k.transpose(0, 1), v.transpose(0, 1)
            out, _, largest = kernels.prefill_attention(
                q,
                None,
                keys[layer, :, :end],
                values[layer, :, :end],
                PrefillOptions(config.head_dim**-0.5, num_threads=torch.get_num_threads()),
                distance=0 if start >= num_tokens else None,
            )
            if largest is not None:
                scores[layer] = scores[layer].maximum(largest[:, :num_tokens])
            return out.to(q.dtype)

        positions = torch.arange(start, end, device=model.device)
        model.forward(twice[start:end], positions, attend, positions[-1:] - start)
    return scores.cpu()


def _fingerprint(model: Decoder, tokens: list[int]) -> str:
    """Return a name for a model and the tokens it reads, whatever folder the model's files are in."""
    what = (model.config, str(model.dtype), model.checksums(), tokens, STEPS)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:20]


def _store(table: Tensor, name: str) -> None:
    """Write a table, whole or not at all. A folder that cannot be written only costs a measurement in the next run."""
    try:
        path = user_cache() / "calibration" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            torch.save(table, file)
        os.replace(file.name, path)
    except OSError as error:
        logging.getLogger(__name__).warning("the calibration cannot be stored: %s", error)
