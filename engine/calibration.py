"""What is measured once for a model: the text it reads, and the user's cache folder, where a result is kept."""

import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from pathlib import Path

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from kvcache.kernels.protocol import PrefillOptions
from kvcache.kernels.registry import kernels_for
from kvcache.sizes.page_format import PageFormat
from kvcache.user_cache import user_cache

NUM_TOKENS = 1000
NUM_SINKS = 16  # first tokens, which receive attention whatever they say
_CHUNK_TOKENS = 250
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

# see(layer, chunk, queries [C, H, D], keys [KVH, N, D] up to the chunk's end, the largest attention to each [KVH, N])
See = Callable[[int, slice, Tensor, Tensor, Tensor | None], None]


def calibration_text() -> str:
    """Return the text to calibrate on: common words in random order, which only copying can predict."""
    return " ".join(random.Random(0).choices(_WORDS, k=NUM_TOKENS))


def calibration_tokens(model: Decoder, token_ids: Tokens[int] = ()) -> list[int]:
    """Return what a model reads to be measured.

    Args:
        token_ids: `calibration_text`, tokenized. If empty, the model reads random tokens, which is a little less
            accurate.
    """
    tokens = list(token_ids) or random.Random(0).choices(range(model.config.vocab_size), k=NUM_TOKENS)
    return tokens[: min(NUM_TOKENS, model.config.max_context // 2)]


def measured_once(
    name: str, model: Decoder, tokens: list[int], shape: tuple[int, ...], measure: Callable[[], Tensor]
) -> Tensor:
    """Return what was measured when this model read these tokens before, else measure and keep it.

    Args:
        name: of what is measured, and of how; another name is another measurement.
        shape: of the result.
    """
    what = (name, model.config, str(model.dtype), model.checksums(), tokens)
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:20]
    place = Path("calibration", f"{digest}.pt")
    try:
        table = torch.load(user_cache() / place, map_location="cpu", weights_only=True)
        if table.shape == shape:
            return table
    except Exception:  # torch.load may raise anything for a damaged file, and measuring again is always right
        pass
    table = measure()
    keep_file(place, lambda path: torch.save(table, path))
    return table


def keep_file(place: Path, write: Callable[[str], object]) -> None:
    """Write a file of the user's cache folder, whole or not at all.

    A folder that cannot be written only costs a measurement in the next run.
    """
    try:
        path = user_cache() / place
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            write(file.name)
        os.replace(file.name, path)
    except OSError as error:
        logging.getLogger(__name__).warning("the calibration cannot be stored: %s", error)


@torch.inference_mode()
def read_whole(model: Decoder, tokens: list[int], see: See, *, scored_from: int | None = None) -> None:
    """Let a model read tokens in chunks, over all their keys and values at full precision.

    Args:
        see: called once a layer and chunk; what it gets is overwritten later.
        scored_from: the largest attention to each key is computed from this token on, where a chunk begins.
    """
    config = model.config
    ids = torch.tensor(tokens, device=model.device)
    shape = (config.num_layers, config.num_kv_heads, len(tokens), config.head_dim)
    keys, values = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    kernels = kernels_for(model.device, PageFormat(16, 16, 16, config.head_dim))
    middle = len(tokens) if scored_from is None else scored_from
    starts = [*range(0, middle, _CHUNK_TOKENS), *range(middle, len(tokens), _CHUNK_TOKENS)]
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        chunk, scored = slice(start, end), start >= middle

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, chunk: slice = chunk, scored: bool = scored
        ) -> Tensor:
            keys[layer, :, chunk], values[layer, :, chunk] = k.transpose(0, 1), v.transpose(0, 1)
            out, _, largest = kernels.prefill_attention(
                q,
                None,
                keys[layer, :, : chunk.stop],
                values[layer, :, : chunk.stop],
                PrefillOptions(config.head_dim**-0.5, num_threads=torch.get_num_threads()),
                distance=0 if scored else None,
            )
            see(layer, chunk, q, keys[layer, :, : chunk.stop], largest)
            return out.to(q.dtype)

        positions = torch.arange(start, end, device=model.device)
        model.forward(ids[start:end], positions, attend, positions[-1:] - start)
