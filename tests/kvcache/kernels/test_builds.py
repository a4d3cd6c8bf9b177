"""The kernels compile for machines that are not this one, and touch no memory that is not theirs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import ops as layer_ops
from kvcache.kernels.cpu import build
from tests.kvcache.kernel_builds import ON_X86, needs_compiler

FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-Wno-psabi"]
ZEN4 = (
    "-march=znver3 -mavx512f -mavx512dq -mavx512bw -mavx512vl -mavx512bf16"  # older compilers lack its name
)


def loop_bodies(source: Path, march: str, listing: Path) -> list[str]:
    """Compile for a machine; return the straight runs of instructions that end in a jump, loops' bodies among them."""
    command = [*build.find_compiler(), *FLAGS, *march.split(), f"-I{Path(build.__file__).parent}"]
    made = subprocess.run(
        [*command, "-S", source, "-o", listing], capture_output=True, text=True, check=False
    )
    if "march" in made.stderr:
        pytest.skip("this compiler does not know the machine")
    assert made.returncode == 0, made.stderr
    return re.split(r"\n\.L\w+:|\n\tj\w+\t.*", listing.read_text())


def last_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_compiler
@pytest.mark.skipif(not ON_X86, reason="x86 instructions")
@pytest.mark.parametrize("march", ["-march=sapphirerapids", ZEN4], ids=["sapphirerapids", "zen4"])
def test_products_are_made_in_registers(march, tmp_path):
    """24 products of a step want all their operands in registers; anything on the stack would cost more than them."""
    source = Path(build.__file__).with_name("prefill.cpp")
    bodies = loop_bodies(source, march, tmp_path / "prefill.s")
    for instruction, products in (("vdpbf16ps", 24), ("vpdpwssd|vpmaddwd", 2 * 24)):
        full = [body for body in bodies if len(re.findall(instruction, body)) == products]
        assert len(full) == 2, "scores and output"
        for body in full:
            found = [line for line in body.splitlines() if re.search(instruction, line)]
            assert all(line.count("%zmm") == 3 for line in found)
            assert "(%rsp" not in body and "(%rbp" not in body


@needs_compiler
@pytest.mark.skipif(not ON_X86, reason="x86 instructions")
@pytest.mark.parametrize(
    ("march", "register", "width"),
    [(ZEN4, "zmm", 24), ("-march=skylake-avx512", "zmm", 24), ("-march=haswell", "ymm", 12)],
    ids=["zen4", "skylake", "haswell"],
)
def test_products_of_weights_are_made_in_registers(march, register, width, tmp_path):
    """Of six rows by a panel: sums stay where they are while floats, or bfloat16 weights one by one, are multiplied."""
    bodies = loop_bodies(Path(layer_ops.__file__).with_name("product.cpp"), march, tmp_path / "product.s")
    kinds = [("vfmadd", width, "vpslld"), ("vfmadd", 2 * width, "vpbroadcastd")]
    for instruction, products, others in kinds + [("vdpbf16ps", width, "vfmadd")] * (march == ZEN4):
        full = [
            body
            for body in bodies
            if len(re.findall(rf"{instruction}.*%{register}", body)) == products and others not in body
        ]
        assert full
        assert not any(re.search(r"vmov\w+\t%.mm\d+, .*\(%r[sb]p\)", body) for body in full)


@pytest.mark.slow
@needs_compiler
def test_the_address_sanitizer_finds_nothing():
    """All kernel tests once more, in a process of its own, which the sanitizer wants to be loaded into first."""
    compiler = build.find_compiler()
    runtime = last_line(*compiler, "-print-file-name=libasan.so")
    if not Path(runtime).exists():
        pytest.skip("the compiler has no address sanitizer")
    environment = os.environ | {
        "CXX": " ".join([*compiler, "-fsanitize=address", "-DKVBATCH_BF16"]),
        "LD_PRELOAD": str(Path(runtime).resolve()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's
        "OMP_NUM_THREADS": "1",
    }
    here = Path(__file__).parent
    files = [here / "test_kernels.py", here / "test_prefill.py"]
    files.append(here.parents[1] / "engine" / "kernels" / "test_layer.py")  # the layer's kernels, built alike
    one_build = "not compiler and not plain and not pairs"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", one_build, *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
