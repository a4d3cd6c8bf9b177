"""The check texts are all there, in one order, each of its own kind, and refer back to what they said before."""

import re
import sys
from importlib.resources import files
from types import ModuleType

import pytest

from engine.check_texts import check_texts

# Name: the share of letters of its script, and something that it introduces in one half and cites in the other.
TEXTS = {
    "prose": ("[A-Za-z]", "Opening Stock"),
    "log": ("[A-Za-z]", "FX-30918"),
    "code": ("[A-Za-z]", "sign_changes"),
    "table": ("[A-Za-z]", "T1"),
    "russian": ("[А-Яа-яЁё]", "Чугунная"),
    "chinese": ("[一-鿿]", "老方"),
}


def test_every_text_of_the_package_is_given_in_one_order():
    assert list(check_texts()) == list(TEXTS)
    stored = {file.name for file in files("engine.check_texts").iterdir() if file.name.endswith(".txt")}
    assert stored == {f"{name}.txt" for name in TEXTS}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_of_its_script_and_refers_back(name):
    text, (letter, cited) = check_texts()[name], TEXTS[name]
    letters = [character for character in text if character.isalpha()]
    assert len(re.findall(letter, text)) > 0.95 * len(letters)
    middle = len(text) // 2
    assert cited in text[:middle] and cited in text[middle:]


@pytest.mark.parametrize("name", TEXTS)
def test_no_passage_is_repeated(name):
    text, width = check_texts()[name], 100
    passages = [text[start : start + width] for start in range(len(text) - width + 1)]
    assert len(passages) == len(set(passages))


def test_code_runs_and_passes_its_own_test(monkeypatch):
    module = ModuleType("tides")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(check_texts()["code"], vars(module))
    module.test_spring_tide_opens_the_bar_longer_than_neap()
