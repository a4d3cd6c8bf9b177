"""How a row is generated: the job's settings, the row's own, and the tokens that end its answer."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine import SamplingParams
from kvbatch.errors import JobFileError
from kvbatch.job_file.sections import GenerationSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopTokens:
    """Know the stop strings that are tokens.

    An answer's text leaves out control tokens, so a string with one in it would never be found there.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        special = set(tokenizer.all_special_tokens)
        special |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special = sorted(special, key=len, reverse=True)

    def ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens that stop strings are.

        Raises:
            ValueError: One holds a control token and more.
        """
        for text in stop:
            control = next((name for name in self._special if name in text), None)
            if control and text not in self._added:
                raise ValueError(
                    f"stop {text!r} holds the control token {control!r} and more, which no answer's text shows; "
                    f"write {control!r} alone, or its number in generation.stop_token_ids"
                )
        return tuple(self._added[text] for text in stop if text in self._added)


class RowSampling:
    """Say of each row how it is generated.

    Args:
        generation: the job's section.
        tokenizer: the model's, from transformers.

    Raises:
        JobFileError: A stop string could never be found.
    """

    def __init__(self, generation: GenerationSection, tokenizer: "PreTrainedTokenizerBase"):
        fields = SamplingParams.__dataclass_fields__
        self._values = {name: value for name, value in generation.model_dump().items() if name in fields}
        self._seed, self._stops = generation.seed, StopTokens(tokenizer)
        self._ends: tuple[int, ...] = ()
        if tokenizer.eos_token_id is not None and not generation.ignore_eos:
            # what ends a turn is not always among the tokens of generation_config.json
            self._ends = (tokenizer.eos_token_id,)
        try:
            self._stops.ids(generation.stop)
        except ValueError as error:
            raise JobFileError(f"generation.{error}") from error

    def params(self, row_id: str, own: Mapping[str, Any]) -> SamplingParams:
        """Return how one row is generated, `own` being what it sets for itself."""
        values = self._values | dict(own)
        ends = (*values["stop_token_ids"], *self._stops.ids(values["stop"]), *self._ends)
        return SamplingParams(**values | {"stop_token_ids": ends, "seed": row_seed(self._seed, row_id)})


def row_seed(job_seed: int, row_id: str) -> int:
    """Return the seed of one row: the same whatever other rows the job has and in which order they run."""
    digest = hashlib.sha256(f"{job_seed}:{row_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: Parquet's int64 has a sign
