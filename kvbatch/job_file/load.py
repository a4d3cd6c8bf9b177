"""From a job file and its overrides to a `Job`, and back.

Every error names the file and line (or the -s argument), the key and the remedy.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from kvbatch.errors import InputError, JobFileError
from kvbatch.job_file.environment import Environment, job_key, read_key
from kvbatch.job_file.extends import read_job_source
from kvbatch.job_file.overrides import apply_overrides
from kvbatch.job_file.renamed_keys import what_became_of
from kvbatch.job_file.sections import Job
from kvbatch.job_file.yaml_source import KeyPath, Source, dotted, expand_environment, parse_scalar

RESOLVED_NAME = "job.resolved.yaml"  # of the job that a run directory keeps


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file.

    Args:
        path: the YAML file.
        overrides: `a.b=c` each, values in YAML.

    Raises:
        JobFileError: The file, an override or a value is wrong; all mistakes are named at once.
        InputError: The job of a run has values from the environment, and the run's key to them is gone.
    """
    source = read_job_source(Path(path))
    apply_overrides(source, overrides)
    expand_environment(source)
    job = _read(source)
    if source.environment:
        environment = Environment(source.environment)
        if environment.hidden:
            environment = Environment(source.environment, _key_of(source, environment, job))
        job = job.with_environment(environment)
    return job


def load_mapping(content: Mapping[str, Any]) -> Job:
    """Read a job from the content of a job file; `extends` and `${NAME}` are for files.

    Raises:
        JobFileError: A value is wrong; all mistakes are named at once.
    """
    return _read(Source(Path("job"), dict(content)))


def _key_of(source: Source, environment: Environment, job: Job) -> bytes:
    """Return the key to values from the environment: of the run that keeps the job file, else of the job."""
    if source.path.name == RESOLVED_NAME and (source.path.parent / "manifest.json").exists():
        try:
            return read_key(source.path.parent)
        except InputError:  # no matter if the run needed none
            if not all(source.is_overridden(key) for key in environment.hidden):
                raise
    return job_key(Path(job.output_dir))


def _read(source: Source) -> Job:
    try:
        return _validate(source)
    except ValidationError as error:
        if not _retype(source, error):
            raise JobFileError(*_explain(source, error)) from None
    try:
        return _validate(source)
    except ValidationError as error:
        raise JobFileError(*_explain(source, error)) from None


def to_yaml(job: Job) -> str:
    """Return the job with all defaults, as a job file that can be run; what the environment says stays there."""
    values = job.environment.as_written(job.model_dump(mode="json"))
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)


def _validate(source: Source) -> Job:
    # through JSON, because only there a strict tuple may be written as a list
    return Job.model_validate_json(json.dumps(source.data, default=str))


def _retype(source: Source, error: ValidationError) -> bool:
    """Read again what was read as the wrong kind.

    Values from the environment as YAML where the key wants no text: `limit: ${N:-10}`. Values of -s as they
    were written where it wants text: `-s prompt.template='Summarise: {text}'` is no mapping. So, too, the items of a
    list: `choices: [yes, 007]` are neither a boolean nor a number.
    """
    changed = False
    for item in error.errors():
        key = _real_key(source.data, item["loc"])
        if key in source.expanded:
            source.expanded.discard(key)
            _set(source.data, key, parse_scalar(_get(source.data, key)))
            changed = True
        elif item["type"] == "string_type" and key in source.texts:
            _set(source.data, key, source.texts[key])
            changed = True
        elif item["type"] == "string_type" and key in source.overrides:
            text = source.overrides[key].partition("=")[2]
            if "${" not in text and not isinstance(_get(source.data, key), list):
                _set(source.data, key, text)
                changed = True
    return changed


def _explain(source: Source, error: ValidationError) -> list[str]:
    messages: dict[KeyPath, str] = {}
    environment = Environment(source.environment)
    for item in error.errors():
        key = _real_key(source.data, item["loc"])
        if item["type"] == "missing" and key[-1:] != item["loc"][-1:]:
            key = (*key, item["loc"][-1])
        known = _known_keys(key[:-1])
        if item["type"] == "extra_forbidden":
            became = what_became_of(dotted(key), item["input"])
            near = difflib.get_close_matches(str(key[-1]), known, n=1, cutoff=0.5)
            home = "" if near else _home_of(str(key[-1]))
            remedy = f"did you mean '{near[0]}'?" if near else f"{home}known here: {', '.join(known)}"
            text = became or f"unknown key '{dotted(key)}'; {remedy}"
        elif item["type"] == "missing":
            text = f"key '{dotted(key)}' is missing; add it"
        else:
            text = _complaint(key, item, environment)
            if not key:  # sections that contradict each other: the message begins with the key at fault
                key = _real_key(source.data, _key_in(text))
        if key in messages and item["type"] != "extra_forbidden":
            other = environment.hide(_lower(item["msg"]))
            if not environment.quotes(key, other):
                messages[key] += f"; or {other}"  # another branch of a union
        else:
            messages[key] = f"{source.place(key)}: {text}"
    return list(messages.values())


def _complaint(key: KeyPath, item: Any, environment: Environment) -> str:
    message = environment.hide(item["msg"].removeprefix("Value error, "))
    if item["type"] != "value_error":
        given = environment.hide(json.dumps(item["input"], ensure_ascii=False, default=str))
        if environment.quotes(key, given):
            given = f"what {environment.names_at(key)} stands for"
        message = f"{_lower(message)}, not {given if len(given) < 80 else given[:77] + '…'}"
        if item["type"] == "string_type" and isinstance(item["input"], dict):  # template: {text}
            message += "; put a value that begins with a brace or holds ': ' in quotes"
    elif environment.quotes(key or _key_in(message), message):
        key = key or _key_in(message)
        message = f"what {environment.names_at(key)} stands for cannot be used here; check the variable"
    return f"key '{dotted(key)}': {message}" if key else message


def _key_in(message: str) -> KeyPath:
    """Return the key that a message about several sections begins with."""
    return tuple(message.split(" ")[0].split("."))


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _real_key(data: Any, loc: Sequence[str | int]) -> KeyPath:
    """Cut pydantic's location to the part that exists in the file: it adds the branches of unions."""
    key: list[str | int] = []
    for part in loc:
        is_item = isinstance(data, list) and isinstance(part, int)
        if not is_item and not (isinstance(data, dict) and part in data):
            break
        data = data[part]
        key.append(part)
    return tuple(key)


def _get(data: Any, key: KeyPath) -> Any:
    for part in key:
        data = data[part]
    return data


def _set(data: Any, key: KeyPath, value: Any) -> None:
    _get(data, key[:-1])[key[-1]] = value


def section_model(annotation: object) -> type[BaseModel] | None:
    """Return the model of a section that may be left out, too; None for any other key."""
    branches = (annotation, *get_args(annotation))
    return next((a for a in branches if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _known_keys(section: KeyPath) -> list[str]:
    model: type[BaseModel] | None = Job
    for part in section:
        field = model.model_fields.get(str(part)) if model else None
        model = section_model(field.annotation) if field else None
    return list(model.model_fields) if model else []


def _home_of(name: str) -> str:
    """Say which section knows a key that was put into the wrong one."""
    homes = [key for key in Job.model_fields if name in _known_keys((key,))]
    return f"'{name}' belongs to '{homes[0]}'; " if homes else ""
