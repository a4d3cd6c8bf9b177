"""What a cache policy costs a model on check texts: the loss that a preset promises (`kvcache.promises`)."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import fmean

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine_core import EngineCore
from engine.memory_division import cache_layout
from engine.models.decoder import Decoder
from engine.request import Request, SamplingParams
from engine.request_pages import request_pages
from engine.teacher_forcing import drift, reading
from kvcache.config import KVCacheConfig

NUM_TOKENS = 2000
_SCORED_RATIO = 0.08  # of a text's tokens, its end
_FACT = "\nThe access code of the north depot is 48213.\n"
_QUESTION = "\n\nWhat is the access code of the north depot? The access code of the north depot is"
_ANSWER = " 48213"
_FACT_PLACE = 0.4  # in the context: far from the tokens that every policy keeps

Encode = Callable[[str], Tokens[int]]


@dataclass(frozen=True)
class CheckText:
    """A text to read, what follows it, and a question about a fact planted in it.

    Question and answer are empty where the context is too short for them; its loss is then that of the continuation.
    """

    name: str
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


def check_texts_of(texts: Mapping[str, str], encode: Encode, max_context: int) -> list[CheckText]:
    """Return texts in tokens, at most `NUM_TOKENS` of each and no more than the context holds.

    Args:
        texts: by name.
        encode: text → token ids, without special tokens.
    """
    fact, question, answer = (tuple(encode(text)) for text in (_FACT, _QUESTION, _ANSWER))
    if 4 * len(fact + question + answer) > max_context:
        fact = question = answer = ()
    most = min(NUM_TOKENS, max_context - len(fact + question + answer))
    found = []
    for name, text in texts.items():
        tokens = tuple(encode(text))[:most]
        scored = max(2, int(len(tokens) * _SCORED_RATIO))
        context, continuation = tokens[:-scored], tokens[-scored:]
        place = int(len(context) * _FACT_PLACE)
        context = context[:place] + fact + context[place:]
        found.append(CheckText(name, context, continuation, question, answer))
    return found


@dataclass(frozen=True)
class Loss:
    """What a policy lost.

    Args:
        value: the mean over all texts, of what a promise measures.
        worst: the text that lost most, and what it lost.
        kv_ratio: bytes of keys and values, of those of the full cache in the same precision.
        num_tokens: of the longest text.
    """

    value: float
    worst: tuple[str, float]
    kv_ratio: float
    num_tokens: int


class LossMeter:
    """Hold policies against the full cache, on one model and one set of texts.

    Args:
        model: loaded for policies that quantize.
        config: of the engines that read; each has a pool for one text.
        texts: what they read.
        advance: told of each text that was read, by the number of its tokens.

    Raises:
        ValueError: There is no text.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        texts: Tokens[CheckText],
        advance: Callable[[str, int], None] = lambda what, tokens: None,
    ) -> None:
        if not texts:
            raise ValueError("there is no text to measure a loss on")
        self._model, self._texts, self._advance = model, texts, advance
        self._config = replace(config, max_sequences=1, prompt_lookup=False)
        self._full: dict[tuple[str, str], tuple[Tensor, int]] = {}
        self._noises: dict[str, float] = {}

    def measure(self, policy: KVCacheConfig, measure: str, limit: float = inf) -> Loss:
        """Read the texts through a cache.

        Args:
            measure: as `kvcache.promises.Promise`.
            limit: reading stops as soon as the mean over all texts must be above it.

        Returns:
            the loss; infinite where the model's logits are not finite.

        Raises:
            ValueError: The policy does not suit the model.
        """
        llm = self._engine(policy)
        losses: dict[str, float] = {}
        ratios = []
        for text in self._texts:
            full, full_bytes = self._by_full_cache(text, measure)
            probs, num_bytes = _read(llm, text, measure)
            self._advance(text.name, len(text.context))
            target = list(text.answer if measure == "question" and text.answer else text.continuation)
            found = drift(target, probs, full.float())
            if measure == "question":
                value = found.nll - found.full_nll
            else:
                value = max(found.kl - self._noise(text), 0.0)  # in this order NaN stays NaN
            losses[text.name] = value if isfinite(value) else inf
            ratios.append(num_bytes / full_bytes)
            if measure == "kl" and sum(losses.values()) > limit * len(self._texts):
                break
        worst = max(losses, key=lambda name: losses[name])
        return Loss(
            sum(losses.values()) / len(self._texts),
            (worst, losses[worst]),
            fmean(ratios),
            max(len(text.context) for text in self._texts),
        )

    def _by_full_cache(self, text: CheckText, measure: str) -> tuple[Tensor, int]:
        """Return log-probabilities, in half precision, and bytes; read once for all policies."""
        key = text.name, measure
        if key not in self._full:
            probs, num_bytes = _read(self._engine(KVCacheConfig()), text, measure)
            self._full[key] = probs.half(), num_bytes
        return self._full[key]

    def _noise(self, text: CheckText) -> float:
        """Return the KL of a cache that loses nothing, which is that of rounding alone; 0 in float32.

        In bfloat16 two orders of the same sums differ: by 0.0017 on SmolLM2-135M, more than half of what `default`
        promises. What a policy loses comes on top of it.
        """
        if self._model.dtype == torch.float32:
            return 0.0
        if text.name not in self._noises:
            full, _ = self._by_full_cache(text, "kl")
            probs, _ = _read(self._engine(KVCacheConfig("sparse")), text, "kl")
            self._noises[text.name] = drift(list(text.continuation), probs, full.float()).kl
            self._advance(text.name, len(text.context))
        return self._noises[text.name]

    def _engine(self, policy: KVCacheConfig) -> EngineCore:
        config = replace(self._config, cache=policy)
        layout = cache_layout(self._model.config, config, self._model.dtype.itemsize)
        pages = max(request_pages(layout, len(text.context), 1) for text in self._texts)
        return EngineCore(self._model, replace(config, pool_pages=pages), lambda token_ids: "")


def _read(llm: EngineCore, text: CheckText, measure: str) -> tuple[Tensor, int]:
    """Return the log-probabilities that stand before what is scored, `[N, V]`, and the bytes that the text holds."""
    asks = measure == "question" and bool(text.question)
    probes = text.question if asks else ()
    request = Request(0, list(text.context), SamplingParams(max_new_tokens=1), probe_token_ids=probes)
    with reading(llm, request) as context:
        if not asks:
            return context.log_probs(list(text.continuation)), context.kept_bytes
        probs = context.log_probs([*text.question, *text.answer])
        return probs[len(text.question) :], context.kept_bytes
