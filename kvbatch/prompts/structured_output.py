"""The form that a job asks of its answers: one of some choices, or JSON of a schema.

Enforced while a row is generated, by llguidance, which turns the grammar into the tokens that may come next; validated
again when the row ended, since an answer may be cut off before its end.
"""

import json
from typing import TYPE_CHECKING, Any

from kvbatch.errors import JobFileError, missing_extra
from kvbatch.job_file.answer_schema import WRITTEN, SchemaValidator
from kvbatch.job_file.sections import GenerationSection

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from torch import Tensor

    from kvbatch.model.handle import ModelHandle


class AnswerForm:
    """Hold a job's grammar, compiled for its model.

    Args:
        generation: with a schema or choices.
        model: whose tokens are meant.

    Raises:
        JobFileError: The schema uses what cannot be enforced, and the message names it; or llguidance is missing.
    """

    def __init__(self, generation: GenerationSection, model: "ModelHandle"):
        self._choices = generation.choices
        key = "choices" if self._choices else "json_schema"
        if problem := missing_extra("grammar", f"generation.{key}"):
            raise JobFileError(problem)
        import llguidance

        if self._choices:
            # a model that answers in running text begins with a space
            grammar = f'start: " "? ({" | ".join(map(_lark_string, self._choices))})'
            grammar = llguidance.LLMatcher.grammar_from_lark(grammar)
        else:
            schema = generation.json_schema or {}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=WRITTEN)
            self._validator = SchemaValidator(schema)
        self._vocab_size = model.config.vocab_size  # may be more than the tokenizer knows
        ends = {*model.config.eos_token_ids, model.tokenizer.eos_token_id} - {None}
        tokens = llguidance.LLTokenizer(
            model.tokenizer.backend_tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=sorted(ends)
        )
        self._matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
        if self._matcher.is_error():
            raise JobFileError(f"generation.{key}: {self._matcher.get_error()}; leave that out of it")

    def constraint(self) -> "RowConstraint":
        """Return one row's way through the grammar, from its beginning."""
        return RowConstraint(self._matcher.deep_copy(), self._vocab_size)

    def validate(self, text: str) -> dict[str, Any]:
        """Return the columns of an answer: its output and JSON, and an error where it is not of the form."""
        if self._choices:
            choice = text.strip()
            if choice in self._choices:
                return {"output": choice}
            return _invalid(text, "is none of generation.choices")
        problem = self._validator.problem(text)
        return _invalid(text, problem) if problem else {"output": text, "output_json": text}


class RowConstraint:
    """See `engine.constraint.Constraint`."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int):
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> "Tensor":
        """See `Constraint.mask`."""
        import numpy as np
        import torch

        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).bool()

    def advance(self, token_id: int) -> None:
        """See `Constraint.advance`."""
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """See `Constraint.finished`; also of a grammar that gave up, whose answer validation then refuses."""
        return self._matcher.is_stopped()


def answer_form(generation: GenerationSection, model: "ModelHandle") -> AnswerForm | None:
    """Return the form that a job asks for, or None; see `AnswerForm`."""
    wanted = generation.choices or generation.json_schema is not None
    return AnswerForm(generation, model) if wanted else None


def _invalid(text: str, problem: str) -> dict[str, Any]:
    return {
        "output": text,
        "kvb_status": "error",
        "kvb_error_code": "invalid_output",
        "kvb_error_message": f"the answer {problem}",
    }


def _lark_string(choice: str) -> str:
    return json.dumps(choice, ensure_ascii=False)
