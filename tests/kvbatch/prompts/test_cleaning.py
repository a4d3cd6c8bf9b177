import pytest

from kvbatch.prompts.cleaning import clean

BASE64 = "iVBORw0KGgo4" * 40
FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("ansi", "\x1b[1;31mERROR\x1b[0m\tdisk\x1b[2K\x1b(B", "ERROR\tdisk"),
        ("ansi", "\x1b]8;;http://x\x1b\\job\x1b]8;;\x07 log \x9b31mred", "job log red"),
        ("ansi", "10%\r20%\r100%\r\nnext\r\r\n", "100%\r\nnext\r\r\n"),
        ("ansi", "a [0m] b\x1b]never ends", "a [0m] bnever ends"),
        ("invisible", "pay\u200bment\u2060 \u202enimda\u202c \ufeffon so\xadft\U000e0041", "payment nimda on soft"),
        ("invisible", "\u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f469 " + FLAG, None),
        ("invisible", "a\u200c\u200d\u200cb", "ab"),
        ("blobs", f'<img src="data:image/png;base64,{BASE64}">', '<img src="[502 characters of data]">'),
        ("blobs", f"-----BEGIN KEY-----\n{BASE64}\n-----END KEY-----\nrest", "[518 characters of data]\nrest"),
        ("blobs", "x\n" + (BASE64[:64] + "\n") * 5 + "end", "x\n[328 characters of data]"),
        ("blobs", "-" * 300 + " " + "word " * 100 + "a" * 300, None),
    ],
)  # fmt: skip
def test_each_kind_is_taken_out_and_nothing_else(kind, text, wanted):
    assert clean(text, [kind]) == (text if wanted is None else wanted)
    others = {"ansi", "invisible", "blobs"} - {kind}
    assert clean(text, others) == text or "data" in clean(text, others)
    assert clean(text, []) == text


@pytest.mark.parametrize(
    "piece", ["\x1b", "\x1b]", "\x1b[0", "x\r", "-----BEGIN A-----", "a" * 255 + " ", "\u200d"]
)
def test_time_grows_with_the_length_alone(piece):
    """A pattern that tries again from every place would take minutes."""
    text = piece * (400_000 // len(piece))
    assert len(clean(text, ["ansi", "invisible", "blobs"])) <= len(text)
