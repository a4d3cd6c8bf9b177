"""`LLM`: texts in, texts out, for scripts and notebooks. Jobs use the `EngineCore` beneath it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from transformers import AutoTokenizer

from engine.calibration import calibration_text
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.engine_core import EngineCore
from engine.errors import ModelError
from engine.kept_policies import policy_of_preset
from engine.memory import resolve_budget
from engine.models import load_model
from engine.models.basis import basis_for
from engine.request import Request, Result, SamplingParams
from kvcache.config import PRESETS, KVCacheConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """Generate for a list of prompts, over one compressed or full KV cache.

    Args:
        core: the engine.
        tokenizer: of its model, from transformers.
    """

    def __init__(self, core: EngineCore, tokenizer: "PreTrainedTokenizerBase"):
        self.core, self.tokenizer = core, tokenizer

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        cache: str | KVCacheConfig | None = "default",
        memory: str | float | int = "60%",
        device: str = "auto",
        dtype: torch.dtype | None = None,
        max_context: int | None = None,
        weight_quant: str | None = None,
    ) -> Self:
        """Load a model of a local directory, as transformers saves it, for a cache policy.

        Args:
            cache: name of a preset (`kvcache.promises`), fitted to the model at its first use; a policy, taken as it
                is; or None for the full cache.
            memory: for keys, values and workspace: `"4GiB"`, `"60%"` of what is free, or bytes.
            device: `cpu`, `cuda`, or `auto`: the GPU where there is one and the policy runs on it.
            dtype: of weights and arithmetic; float32 on a CPU and bfloat16 on a GPU by default.
            max_context: positions to prepare; the model's own by default.
            weight_quant: `int8` keeps the layers' matrices in int8, on a CPU.

        Raises:
            ModelError: The model's files are missing, corrupt or of an unknown architecture.
            BudgetError: The memory is not there, or too small.
            EngineError: The preset cannot keep its promise on the model.
            ValueError: The preset is unknown, or the policy does not suit the model or the device.
        """
        policy = _preset(cache) if isinstance(cache, str) else cache or KVCacheConfig()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() and not policy.compresses else "cpu"
        model = load_model(
            path,
            dtype=dtype or (torch.float32 if device == "cpu" else torch.bfloat16),
            device=device,
            max_context=max_context,
            weight_quant=weight_quant,
            basis=basis_for(policy, weight_quant),
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error
        config = EngineConfig(
            memory_budget_bytes=resolve_budget(memory, device),
            cache=policy,
            calibration_token_ids=tuple(tokenizer.encode(calibration_text(), add_special_tokens=False)),
        )
        if isinstance(cache, str):

            def encode(text: str) -> list[int]:
                return tokenizer.encode(text, add_special_tokens=False)

            config = replace(config, cache=policy_of_preset(cache, model, config, encode))
        return cls(EngineCore(model, config, Detokenizer(tokenizer)), tokenizer)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Result]:
        """Generate for every prompt; return the results in the order of the prompts.

        A prompt that cannot run, such as one longer than the model's context, has a result with finish reason `error`
        and its reason in `error_message`; the others are not affected.

        Args:
            prompts: texts, which the tokenizer encodes with its special tokens, or token ids.
            sampling: for all prompts; greedy by default. Each prompt draws from a seed of its own: the seed plus its
                place in the list.

        Raises:
            TypeError: `prompts` is a single text.
        """
        if isinstance(prompts, str):
            raise TypeError("generate takes a list of prompts; write [prompt] for one")
        sampling = sampling or SamplingParams()
        requests = (
            Request(place, self._encode(prompt), replace(sampling, seed=sampling.seed + place))
            for place, prompt in enumerate(prompts)
        )
        results = {result.request_id: result for result in self.core.generate(requests)}
        return [results[place] for place in range(len(prompts))]

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _preset(name: str) -> KVCacheConfig:
    if name not in PRESETS:
        raise ValueError(f"cache {name!r} is no preset; use one of {', '.join(PRESETS)}, or a KVCacheConfig")
    return PRESETS[name]
