"""Validate and parse requests of OpenAI's batch format, one request per line.

A key of a request is applied, ignored or rejected. A rejected key rejects its row.

https://platform.openai.com/docs/guides/batch
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbatch.corpus.json_values import BadRecord

ID_NAME = "custom_id"
TEXT_NAME = "body"
_URL = "/v1/chat/completions"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# accepted values of keys that are not supported: they have the same effect as leaving the key out
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "stop": ([],),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True)
class ChatRequest:
    """One row's conversation.

    Args:
        messages: role and text of each.
        sampling: keys of a job's generation section that the row sets for itself.
        template_arguments: arguments of the chat template that the row sets; they override the job's arguments.
    """

    messages: tuple[tuple[str, str], ...]
    sampling: Mapping[str, Any]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def check_request(record: Mapping[str, Any], text: str) -> None:
    """Prove that a line is a request that can be obeyed.

    Args:
        text: its body, as JSON.

    Raises:
        BadRecord: It is not; the key at fault is named.
    """
    if not isinstance(record.get(ID_NAME), str):
        raise BadRecord("bad_request", f"{ID_NAME!r} must be a string")
    if record.get("method", "POST") != "POST" or record.get("url", _URL) != _URL:
        raise BadRecord("bad_request", f"only POST {_URL} is answered")
    parse_body(text)


def parse_body(text: str) -> ChatRequest:
    """Return the request in the JSON of a body; raises as `check_request`."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        reason = "'body' is no JSON, or nested too deep, or holds a number of thousands of digits"
        raise BadRecord("bad_request", reason) from None
    if not isinstance(body, dict):
        raise BadRecord("bad_request", "'body' must be an object")
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise BadRecord("bad_request", "body.messages must be a list of messages")
    found = tuple(_message(message, f"body.messages[{i}]") for i, message in enumerate(messages))
    arguments = body.pop("chat_template_kwargs", None) or {}
    _check(isinstance(arguments, dict), "chat_template_kwargs", "must be an object")
    try:
        check_arguments(arguments, "body.chat_template_kwargs")
    except ValueError as error:
        raise BadRecord("bad_request", str(error)) from None
    sampling = _sampling({key: value for key, value in body.items() if value is not None})
    return ChatRequest(found, sampling, arguments)


def _message(message: Any, where: str) -> tuple[str, str]:
    role, content = (
        (message.get(key) for key in ("role", "content")) if isinstance(message, dict) else (None, None)
    )
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRecord("bad_request", f"{where}.role must be one of {', '.join(_ROLES)}")
    if message.keys() - {"role", "content"}:
        raise BadRecord("bad_request", f"{where}: only role and content are supported")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRecord("bad_request", f"{where}.content: only parts of type text are supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRecord("bad_request", f"{where}.content must be text")
    return _ROLES[role], content


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for key, value in body.items():
        if key in _IGNORED or value in _HARMLESS.get(key, ()):
            continue
        if key in ("max_tokens", "max_completion_tokens"):
            _check(type(value) is int and value >= 1, key, "must be an integer of at least 1")
            sampling["max_new_tokens"] = min(value, sampling.get("max_new_tokens", value))
        elif key in ("temperature", "top_p"):
            is_number = type(value) in (int, float)
            _check(
                is_number and (0 <= value <= 2 if key == "temperature" else 0 < value <= 1),
                key,
                "is out of range",
            )
            sampling[key] = float(value)
        elif key == "stop":
            stop = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else ()
            _check(bool(stop) and all(isinstance(each, str) and each for each in stop), key, "must be text")
            sampling["stop"] = stop
        else:
            raise BadRecord("bad_request", f"body.{key} is not supported")
    return sampling


def _check(holds: bool, key: str, problem: str) -> None:
    if not holds:
        raise BadRecord("bad_request", f"body.{key} {problem}")


# What transformers' `apply_chat_template` or the template itself takes under these names; the rest is the user's.
_RESERVED = re.compile(
    "conversations?|messages|tools|documents|chat_template|add_generation_prompt|continue_final_message|tokenize"
    "|sanitize_control_tokens|padding|truncation|max_length|return_(tensors|dict|assistant_tokens_mask)"
    "|tokenizer_kwargs|strftime_now|raise_exception|namespace|range|dict|(bos|eos|unk|sep|pad|cls|mask)_token"
    "|additional_special_tokens"
)


def check_arguments(arguments: Mapping[str, Any], key: str) -> None:
    """Prove that a chat template may be given these arguments.

    Raises:
        ValueError: A name has another meaning, or a number is none; it is named after `key`.
    """
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        raise ValueError(f"{key}: its numbers must be finite") from None
    for name in arguments:
        if _RESERVED.fullmatch(name):
            raise ValueError(f"{key}.{name} is set by kvbatch and cannot be an argument; leave it out")
