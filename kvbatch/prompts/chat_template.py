"""A model's chat template, rendered as transformers renders it, but the same however often and whenever.

Beside the messages a template gets the time, which is the run's own, and the job's arguments.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = re.compile("\ue000kvb([0-9]+)\ue000")  # what a message says stands here once the template is rendered

_PROBES = (("system", "user"), ("user",), ("user", "assistant", "user"))


def mark(number: int) -> str:
    """Return what holds the place of a text in a message."""
    return f"\ue000kvb{number}\ue000"


def now() -> datetime:
    """Return the local time, its offset and no fractions of a second."""
    return datetime.now().astimezone().replace(microsecond=0)


class ChatTemplate:
    """Render conversations.

    Args:
        tokenizer: the model's, from transformers.
        time: what the template takes for now; the local time by default.
        arguments: `generation.chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        time: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
    ):
        self._tokenizer = tokenizer
        self.time = time or now()
        self.arguments = dict(arguments or {})
        self._asked_time = False

    def at(self, time: datetime) -> "ChatTemplate":
        """Return the same template at another time."""
        return ChatTemplate(self._tokenizer, time, self.arguments)

    def render(
        self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Return a conversation as the model reads it, up to where the answer begins.

        Args:
            arguments: over the job's.

        Raises:
            Exception: Templates raise what they like, most often over a turn they do not know.
        """
        seen = self._tokenizer.special_tokens_map | self.arguments | dict(arguments or {})
        own = {"messages": list(map(dict, messages)), "tools": None, "documents": None}
        return self._compiled.render(seen | own | {"add_generation_prompt": True})

    @cached_property
    def _compiled(self) -> Any:
        """The template in transformers' own environment, but for the clock and chance.

        transformers takes no other clock through `apply_chat_template`: whatever is no JSON is kept from templates.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = self._tokenizer.get_chat_template()
        environment = _compile_jinja_template(source).environment.overlay()
        environment.globals = {
            **environment.globals,
            "strftime_now": self._strftime,
            "lipsum": _draw_at_random,
        }
        environment.filters = {**environment.filters, "random": _draw_at_random}
        return environment.from_string(source)

    def _strftime(self, form: str) -> str:
        self._asked_time = True
        return self.time.replace(tzinfo=None).strftime(form)  # as transformers, whose time knows no zone

    @cached_property
    def digest(self) -> str:
        """A hash over what the template makes of fixed conversations: the same, whatever the job asks."""
        found = []
        for roles in _PROBES:
            messages = [{"role": role, "content": mark(i)} for i, role in enumerate(roles)]
            try:
                found.append(self.render(messages))
            except Exception as error:  # refused: known by its message
                found.append(f"{type(error).__name__}: {error}")
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()

    @property
    def shows_time(self) -> bool:
        """Whether the template writes the time into a prompt."""
        return bool(self.digest) and self._asked_time

    @property
    def unused_arguments(self) -> list[str]:
        """The job's arguments that the template does not mention."""
        source = str(self._tokenizer.chat_template)
        return [name for name in self.arguments if not re.search(rf"\b{re.escape(name)}\b", source)]


def _draw_at_random(*args: Any, **kwargs: Any) -> str:
    import jinja2

    raise jinja2.TemplateError("it draws at random, and a prompt must be the same whenever it is made")
