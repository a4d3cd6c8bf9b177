"""Six texts of different kinds, on which the loss of a cache policy is measured. Imports: nothing."""

from importlib.resources import files

_NAMES = ("prose", "log", "code", "table", "russian", "chinese")


def check_texts() -> dict[str, str]:
    """Return each text by its name, in a fixed order; each has 2,080 to 2,250 tokens.

    The first four are counted by the tokenizer of SmolLM2, the last two by that of Qwen2.5. Each refers back to names,
    numbers and definitions that it gave many tokens before.
    """
    directory = files("engine.check_texts")
    return {name: directory.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in _NAMES}
