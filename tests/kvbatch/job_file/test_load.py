"""Job files: every mistake is named with place and remedy; the hash sees what changes the output."""

from dataclasses import fields
from pathlib import Path

import pytest

from kvbatch.corpus import InputSpec
from kvbatch.errors import JobFileError
from kvbatch.job_file.load import load_job, to_yaml
from kvbatch.job_file.renamed_keys import OLD_KEYS, Gone
from kvbatch.job_file.sections import InputSection
from kvbatch.run_dir.fingerprint import config_hash

# Eight times eight times … eight items.
ALIASES = ", ".join(f"&{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 8)}]" for n in range(8))
GOOD = """\
version: 1
name: demo
input: {path: [a.jsonl, "b/*.parquet"], passthrough: [question]}
model: {path: pypi:some-model==1.0}
prompt:
  system: Be brief.
  template: "{text} Question: {question} {{literal}}"
generation: {max_new_tokens: 5}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_and_overrides(write):
    job = load_job(write(GOOD), ["engine.memory_budget=4GiB", "generation.temperature=1", "input.limit=3"])
    assert job.input.paths == ("a.jsonl", "b/*.parquet")
    assert job.output_dir == "runs/demo"
    assert (job.engine.memory_budget, job.generation.temperature, job.input.limit) == ("4GiB", 1.0, 3)
    assert job.generation.repetition_stop and not job.cache.policy.compresses


@pytest.mark.parametrize(
    ("old", "new", "overrides", "expected"),
    [
        (
            "max_new_tokens",
            "max_tokens",
            [],
            [":8", "generation.max_tokens", "did you mean 'max_new_tokens'"],
        ),
        ("max_new_tokens: 5", "device: cpu", [], ["generation.device", "belongs to 'engine'"]),
        ("max_new_tokens: 5", "top_p: 1.5", [], [":8", "generation.top_p", "less than or equal to 1"]),
        ("max_new_tokens: 5", "max_new_tokens: five", [], ["generation.max_new_tokens", "integer", '"five"']),
        ("name: demo\n", "", [], ["'name' is missing"]),
        ("version: 1", "version: 2", [], [":1", "'version'", "1"]),
        ("name: demo", "name: a/b", [], [":2", "'name'"]),
        ("{text} ", "", [], [":7", "prompt.template", "{text} must stand exactly once"]),
        ("{{literal}}", "{literal", [], ["prompt.template", "{{ and }}"]),
        ("{question}", "{question:>9}", [], ["{question:>9} is not a placeholder"]),
        ("[question]", "[]", [], [":7", "prompt.template uses {question}", "input.passthrough"]),
        ("Be brief.", "'{text}'", [], ["prompt.system", "only in prompt.template"]),
        ("name: demo", "name: demo\nname: other", [], [":3", "'name' stands twice", "line 2"]),
        ("name: demo", "name: [", [], ["not valid YAML"]),
        ("name: demo", "name: &x [*x]", [], ["an alias"]),
        ("name: demo", "name: [&a [0, 0, 0, 0, 0, 0, 0, 0], " + ALIASES + "]", [], ["100,000 keys"]),
        ("name: demo", "name: demo\non: 1", [], [":3", "'on' is a bool to YAML", "quotes"]),
        ("name: demo", "name: {{text}}", [], [":2", "in quotes"]),
        ("Be brief.", "{x}", [], [":6", "prompt.system", "in quotes"]),
        ("demo", "${KVB_UNSET}", [], [":2", "KVB_UNSET", "${KVB_UNSET:-default}"]),
        (
            "",
            "",
            ["generation.max_tokens=3"],
            ["-s generation.max_tokens=3", "did you mean 'max_new_tokens'"],
        ),
        ("", "", ["limit"], ["-s limit", "section.key=value"]),
        ("", "", ["name.x=1"], ["'name' is a value, not a section"]),
        ("", "", ["engine.memory_budget=110%"], ["engine.memory_budget", "4GiB"]),
        (
            "",
            "",
            ["cache.compress_method=quant", "cache.keep_ratio=0.5"],
            ["cache", "keep_ratio 0.5 drops tokens"],
        ),
        ("", "", ["cache.preset=logs", "cache.quant_bits=2"], ["cache", "2 bits ruin"]),
        ("", "", ["cache.preset=tiny"], ["cache.preset", "'aggressive'"]),
    ],
)
def test_mistakes_are_named(write, old, new, overrides, expected):
    path = write(GOOD.replace(old, new, 1) if old else GOOD)
    with pytest.raises(JobFileError) as caught:
        load_job(path, overrides)
    for part in expected:
        assert part in str(caught.value)
    assert str(path) in str(caught.value) or overrides


def test_all_mistakes_are_told_at_once(write):
    with pytest.raises(JobFileError) as caught:
        load_job(write(GOOD + "foo: 1\nengine: {devise: cpu}\n"))
    assert "foo" in str(caught.value) and "did you mean 'device'" in str(caught.value)
    with pytest.raises(JobFileError, match=r"(?s)'name' is missing.*'input' is missing.*'model' is missing"):
        load_job(write("version: 1\n"))


def test_old_names_are_answered_by_new_ones(write):
    for key, found in OLD_KEYS.items():
        section, name = key.split(".")
        text = GOOD.replace("input: {", f"input: {{{name}: x, ") if section == "input" else GOOD
        text += f"{section}: {{{name}: x}}\n" if section != "input" else ""
        with pytest.raises(JobFileError, match=rf"job\.yaml:\d+: '{key}' is (called|gone)") as caught:
            load_job(write(text))
        assert caught.value.exit_code == 78
        if not isinstance(found, Gone):
            with pytest.raises(JobFileError, match=f"'{found.key}'"):  # the new key is one
                load_job(write(GOOD), [f"{found.key}=no such value"])
    with pytest.raises(JobFileError) as caught:
        load_job(write(GOOD), ["long_document.drop=head", "cache.whole_dtype=bfloat16"])
    assert caught.value.args == (
        "-s long_document.drop=head: 'long_document.drop' is called 'long_document.truncation_side' now; "
        "write truncation_side: left in section long_document",
        "-s cache.whole_dtype=bfloat16: 'cache.whole_dtype' is called 'cache.dtype' now; "
        "write dtype in section cache",
    )


def test_the_corpus_gets_every_key_of_the_input_section():
    section = InputSection(path="a", where="n > 1", encoding_errors="replace", limit=3)
    spec = section.spec()
    assert (spec.paths, spec.where, spec.encoding_errors, spec.limit) == (("a",), "n > 1", "replace", 3)
    keys = {field.name for field in fields(InputSpec)}
    assert keys == {"paths", *InputSection.model_fields} - {"path", "incremental"}


def test_a_missing_job_file_names_its_neighbour(write):
    with pytest.raises(JobFileError, match=r"did you mean .*job\.yaml"):
        load_job(write(GOOD).with_name("jub.yaml"))


def test_environment(write, monkeypatch):
    monkeypatch.setenv("KVB_NAME", "007")
    text = GOOD.replace("demo", "${KVB_NAME}").replace("Be brief.", "$${{HOME}} ${KVB_UNSET:-x}")
    job = load_job(write(text.replace("max_new_tokens: 5", "max_new_tokens: '${KVB_UNSET:-9}'")))
    assert job.name == "007"  # text where the key wants text …
    assert job.generation.max_new_tokens == 9  # … and a number where it wants one
    assert job.prompt.system == "${{HOME}} x"


def test_an_override_is_text_where_the_key_wants_text(write):
    job = load_job(write(GOOD), ["prompt.template=Summarise: {text}", "name=2024", "generation.stop=[a]"])
    assert (job.prompt.template, job.name, job.generation.stop) == ("Summarise: {text}", "2024", ("a",))


def test_resolved_job_is_the_same_job(write):
    job = load_job(write(GOOD.replace("Be brief.", "$${{HOME}} costs 1:2")))
    assert load_job(write(to_yaml(job))) == job


WRITTEN = "yes, no, off, 1.0, 007, 1_000, 0x1F, 1:30, null, ~, .inf, 2024-01-01, <, =, <<, plain"


def test_items_of_a_list_of_text_are_as_they_are_written(write, tmp_path):
    path = write(GOOD.replace("max_new_tokens: 5", f"choices: [{WRITTEN}]"))
    job = load_job(path)
    assert job.generation.choices == tuple(WRITTEN.split(", "))
    assert load_job(path, ["generation.choices=[no, 0.10]"]).generation.choices == ("no", "0.10")
    with pytest.raises(
        JobFileError, match=r"-s generation.choices=.*'generation.choices\[1\]'.*valid string"
    ):
        load_job(path, ["generation.choices=[no, {a: b}]"])
    over = tmp_path / "over.yaml"
    over.write_text("extends: job.yaml\nname: other\n")
    assert load_job(over).generation.choices == job.generation.choices
    over.write_text(
        "extends: job.yaml\ngeneration: {<<: {choices: [on], stop: [1.50]}, choices: [2, 1.50]}\n"
    )
    with pytest.raises(JobFileError, match="stop would cut"):
        load_job(over)
    over.write_text("extends: job.yaml\ngeneration: {<<: {choices: [on]}, seed: 2}\n")
    assert load_job(over).generation.choices == ("on",)
    assert load_job(write(to_yaml(job))) == job


def test_packages_of_one_model_are_a_list_with_the_hash_of_the_whole(write):
    packages, whole = ("pypi:a==1.0", "pypi:b==1.0"), f"model.sha256={'0' * 64}"
    job = load_job(write(GOOD), ["model.path=[pypi:a==1.0, pypi:b==1.0]", whole])
    assert (job.model.path, job.model.name) == (packages, "pypi:a==1.0 and 1 more")
    assert load_job(write(to_yaml(job))) == job
    for overrides, message in (
        (["model.path=[pypi:a==1.0, pypi:b==1.0]"], "add model.sha256"),
        (["model.path=[pypi:a==1.0, some/model]", whole], "'some/model' is none"),
        (["model.path=[]", whole], "at least 1 item"),
        (["model.sha256=abc"], "pattern"),
    ):
        with pytest.raises(JobFileError, match=message):
            load_job(write(GOOD), overrides)


def test_hash_covers_the_output_alone(write):
    path = write(GOOD)
    base = config_hash(load_job(path))
    for operational in (
        "engine.threads=1",
        "output.dir=elsewhere",
        "engine.memory_budget=1GiB",
        "name=other",
    ):
        assert config_hash(load_job(path, [operational])) == base
    for semantic in (
        "generation.seed=1",
        "prompt.system=x",
        "input.limit=2",
        "long_document.truncation_side=left",
    ):
        assert config_hash(load_job(path, [semantic])) != base
