"""`kvbatch calibrate`: fit the cache presets to a model, once, before jobs ask for them."""

from typing import TYPE_CHECKING, Any

import click

from kvbatch.commands.common import guarded, print_json
from kvbatch.errors import JobFileError, LimitExceeded
from kvbatch.text import escaped
from kvcache.promises import PROMISES

if TYPE_CHECKING:
    from engine.promise import FittedPolicy
    from kvbatch.model.handle import ModelHandle
    from kvbatch.progress.display import Progress


@click.command()
@click.argument("model")
@click.option(
    "--preset",
    "presets",
    multiple=True,
    type=click.Choice(list(PROMISES)),
    help="All by default; may repeat.",
)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), help="As model.dtype of a job.")
@click.option("--weight-quant", type=click.Choice(["int8"]), help="As model.weight_quant of a job.")
@click.option("--max-context", type=click.IntRange(min=1), help="As model.max_context of a job.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="As engine.device of a job.")
@click.option("--threads", type=click.IntRange(min=1), help="As engine.threads of a job.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def calibrate(model: str, presets: tuple[str, ...], as_json: bool, **keys: Any) -> int:
    """Find for MODEL, as model.path of a job, the fewest bytes at which each cache preset keeps its promise.

    Exit 65 if a preset cannot keep it.
    """
    from pydantic import ValidationError

    from kvbatch.job_file.sections import EngineSection, ModelSection
    from kvbatch.model.handle import open_model
    from kvbatch.progress.display import Progress
    from kvbatch.signals import stop_on_signals
    from kvcache.config import KVCacheConfig

    given = {name: value for name, value in keys.items() if value is not None}
    engine = {name: given.pop(name) for name in ("device", "threads") if name in given}
    try:
        sections = ModelSection(path=model, **given), EngineSection(**engine)
    except ValidationError as error:
        raise JobFileError(str(error.errors()[0]["msg"])) from error
    found = {}
    with stop_on_signals(), Progress() as progress:
        progress.start("opening")
        handle = open_model(*sections, KVCacheConfig.preset("default"))
        for preset in presets or PROMISES:
            found[preset] = _fit(handle, preset, progress)
            if not as_json:
                verdict = "" if found[preset].holds else "; its promise cannot be kept"
                print(f"{preset:<12} {escaped(str(found[preset]))}{verdict}", flush=True)
    if as_json:
        print_json(
            {
                "model": model,
                "presets": {name: each.to_dict() | {"holds": each.holds} for name, each in found.items()},
            }
        )
    return 0 if all(each.holds for each in found.values()) else LimitExceeded.exit_code


def _fit(handle: "ModelHandle", preset: str, progress: "Progress") -> "FittedPolicy":
    from engine import EngineConfig
    from engine.calibration import calibration_text
    from engine.memory import resolve_budget
    from kvbatch.job_file.sections import CacheSection
    from kvbatch.model.cache_policy import fit_policy, policy_key

    def advance(text: str, num_tokens: int) -> None:
        progress.step(f"preset {preset}, read the text {text}")
        progress.advance(0, num_tokens)

    progress.start("calibrating")
    progress.step(f"preset {preset}")
    handle.decoder  # noqa: B018 loaded before the memory for the cache is counted
    words = handle.tokenizer.encode(calibration_text(), add_special_tokens=False)
    config = EngineConfig(resolve_budget("60%", handle.device), calibration_token_ids=tuple(words))
    return fit_policy(policy_key(handle, CacheSection(preset=preset)), handle, config, advance)
