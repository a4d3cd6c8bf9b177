import bz2
import gzip
import io
import lzma

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbatch.corpus.compression import StreamError, open_stream
from kvbatch.corpus.lines import iter_lines

PACK = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}
DATA = bytes(range(256)) * 3000


def unpack(path):
    stream, layers = open_stream(str(path))
    with stream:
        return stream.read(), layers


@pytest.mark.parametrize("codec", PACK)
def test_frames_follow_each_other_and_nest(tmp_path, codec):
    path = tmp_path / "no-suffix"
    path.write_bytes(PACK[codec](DATA) + PACK[codec](b"") + PACK[codec](b"end"))
    assert unpack(path) == (DATA + b"end", (codec,))
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert unpack(path) == (DATA + b"end", ("gzip", codec))


@pytest.mark.parametrize("codec", PACK)
@pytest.mark.parametrize("num_whole_frames", [0, 1])
def test_a_cut_stream_is_truncated_wherever_it_is_cut(tmp_path, codec, num_whole_frames):
    packed = PACK[codec](DATA)
    path = tmp_path / "cut"
    for kept in (len(packed) - 1, len(packed) // 2, 7):
        path.write_bytes(packed * num_whole_frames + packed[:kept])
        with pytest.raises(StreamError, match="truncated"):
            unpack(path)


@pytest.mark.parametrize("codec", PACK)
def test_what_follows_the_last_frame_is_not_passed_over(tmp_path, codec):
    path = tmp_path / "tail"
    path.write_bytes(PACK[codec](DATA) + b"more than padding")
    with pytest.raises(StreamError, match="damaged|follow the"):
        unpack(path)


def test_zero_padding_after_gzip_is_allowed(tmp_path):
    path = tmp_path / "padded"
    path.write_bytes(gzip.compress(b"a") + bytes(512) + gzip.compress(b"b") + bytes(512))
    assert unpack(path)[0] == b"ab"


@given(
    lines=st.lists(
        st.binary(min_size=1, max_size=40).filter(lambda line: b"\n" not in line and line.strip())
    ),
    chunk_bytes=st.integers(1, 50),
    crlf=st.booleans(),
)
def test_lines_do_not_depend_on_where_blocks_end(lines, chunk_bytes, crlf):
    lines = [line.removesuffix(b"\r") for line in lines if not line.startswith(b"\xef\xbb\xbf")]
    lines = [line for line in lines if line.strip()]
    data = b"\xef\xbb\xbf" + (b"\r\n" if crlf else b"\n").join([*lines, b" \t", b""])
    found = list(iter_lines(io.BytesIO(data), 1000, chunk_bytes))
    assert [(line.number, line.data) for line in found] == list(enumerate(lines, 1))


def test_a_line_over_the_limit_is_counted_but_not_kept():
    data = b"ab\n" + b"x" * 1000 + b"\n\ncd\n"
    found = [(line.number, line.data, line.num_bytes) for line in iter_lines(io.BytesIO(data), 10, 7)]
    assert found == [(1, b"ab", 2), (2, None, 1000), (4, b"cd", 2)]
