"""What README and docs name is there: commands, files, links, keys, columns, job files."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from kvbatch.cli import cli
from kvbatch.job_file.load import load_job
from kvbatch.job_file.reference import markdown
from kvbatch.run_dir.output_schema import INPUT_FIELDS, OUTPUT_FIELDS
from tests.docs.helpers import ALL_PAGES, PAGES, ROOT, blocks, name, prose, quoted

SHELL_END = re.compile(r"\s(#|\||&&|;|\d?>)")
COMMAND = re.compile(r"(?:^|[\s/(])kvbatch ([a-z].*)")
FILE = re.compile(
    r"(?<![\w./-])\.?/?((?:kvbatch|engine|kvcache|jobs|scripts|tests|benchmarks|docs)/[\w./-]*)"
)
JOB = """\
version: 1
name: base
input: {path: a.jsonl}
model: {path: some/model}
prompt: {template: "{text}"}
"""

pages = pytest.mark.parametrize("page", PAGES, ids=name)
all_pages = pytest.mark.parametrize("page", ALL_PAGES, ids=name)


def command_lines(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Yield the arguments of each `kvbatch` command, and whether it is shown to be typed as it is."""
    shown = [line for block in blocks(page, "bash") for line in block.splitlines()]
    for lines, is_shown in ((shown, True), (quoted(page), False)):
        for line in lines:
            if found := COMMAND.search(line):
                yield shlex.split(SHELL_END.split(found[1] + " ")[0]), is_shown


@pages
def test_commands_are_those_of_the_command_line(page):
    for arguments, is_shown in command_lines(page):
        line = f"{name(page)}: kvbatch {shlex.join(arguments)}"
        command: click.Command | None = cli
        while isinstance(command, click.Group) and arguments:
            given, *arguments = arguments
            command = command.commands.get(given)
        assert command, f"{line}: there is no such command"
        try:
            command.make_context(given, arguments, resilient_parsing=False)
        except click.MissingParameter:
            assert not is_shown, f"{line}: an argument is missing"
        except click.ClickException as error:
            pytest.fail(f"{line}: {error.format_message()}")


def test_every_command_is_documented():
    lines = [" ".join(arguments) for page in PAGES for arguments, _ in command_lines(page)]
    assert {line.partition(" ")[0] for line in lines} == set(cli.commands)
    groups = [group for group in cli.commands.values() if isinstance(group, click.Group)]
    wanted = [f"{group.name} {command}" for group in groups for command in group.commands]
    assert wanted and not [each for each in wanted if not any(line.startswith(each) for line in lines)]


@all_pages
def test_files_are_there(page):
    for path in FILE.findall(page.read_text()):
        path = path.rstrip("./")
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), f"{name(page)} names {path}"


@all_pages
def test_options_of_scripts_are_there(page):
    shown = "\n".join([*blocks(page, "bash"), *blocks(page, "")]).replace("\\\n", " ")
    for script, arguments in re.findall(r"(scripts/\w+\.py)(.*)", shown):
        source = (ROOT / script).read_text()
        if "from evaluation import" in source:
            source += (ROOT / "scripts" / "evaluation.py").read_text()
        known = set(re.findall(r'"(--[a-z-]+)"', source))
        wrong = set(re.findall(r"--[a-z][a-z-]*", arguments)) - known
        assert not wrong, f"{name(page)}: {script} has no {', '.join(sorted(wrong))}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings have on GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@all_pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists() and found.is_relative_to(ROOT), f"{name(page)} links to {target}"
        assert not anchor or anchor in anchors(found), f"{name(page)} links to {target}: no such heading"


@all_pages
def test_job_keys_are_those_of_the_job_file(page):
    keys = set(re.findall(r"^\| `([a-z_0-9.]+)`", markdown(), re.M))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    found = re.findall(
        rf"(?<![\w./-])(?:{'|'.join(sections)})\.[a-z_0-9]+(?![\w/.(])", " ; ".join(quoted(page))
    )
    shown = [line for block in blocks(page, "bash") for line in block.splitlines()]
    found += re.findall(r"(?:-s|--what-if) ([a-z_.0-9]+)=", "\n".join(shown))
    wrong = set(found) - keys
    assert not wrong, f"{name(page)} names keys that no job file has: {', '.join(sorted(wrong))}"


@all_pages
def test_columns_are_those_of_the_output(page):
    known = {field.name for field in (*OUTPUT_FIELDS, *INPUT_FIELDS)}
    wrong = set(re.findall(r"\bkvb_\w+", page.read_text())) - known
    assert not wrong, f"{name(page)} names columns that no output has: {', '.join(sorted(wrong))}"


def test_every_column_is_documented():
    text = (ROOT / "docs" / "operations.md").read_text()
    assert not [field.name for field in OUTPUT_FIELDS if f"`{field.name}`" not in text]


@pages
def test_job_files_are_valid(page, tmp_path):
    (tmp_path / "base.yaml").write_text(JOB)
    for number, block in enumerate(blocks(page, "yaml")):
        path = tmp_path / f"{number}.yaml"
        is_whole = "version" in yaml.safe_load(block)
        path.write_text(block if is_whole else f"extends: base.yaml\n{block}")
        load_job(path)


def test_the_readme_is_read_in_minutes():
    words = re.findall(r"[A-Za-z0-9][\w.'/-]*", (ROOT / "README.md").read_text())
    assert 700 <= len(words) <= 900, f"{len(words)} words"
