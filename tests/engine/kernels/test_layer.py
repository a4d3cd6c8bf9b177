"""The layer's C++ kernels give what their torch references give, on any number of threads."""

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import ops, reference
from engine.kernels.int8 import Int8Rows, quantize_weight
from engine.kernels.packed import pack_weight
from engine.kernels.registry import float_panel
from engine.models import load_model
from engine.models.compiled_layers import CompiledPasses, can_compile
from engine.models.layers import Passes
from kvcache.kernels.cpu import build
from kvcache.quantize.pages import rotation
from tests.engine.helpers import rows_are_alike
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvcache.kernel_builds import ON_X86

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)) or ops.library() is None, reason="no C++ compiler"
)
DTYPES = (torch.float32, torch.bfloat16)


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # bfloat16 numbers may be rounded the other way where float32 differs in its last digits
    tolerance = 8e-3 if expected.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def key_turn(head_dim: int, turned: list[int]) -> reference.KeyTurn:
    return reference.KeyTurn(rotation(head_dim), torch.tensor(turned, dtype=torch.uint8))


def empty_rows(num_rows: int, width: int) -> Int8Rows:
    return Int8Rows(torch.empty(num_rows, width, dtype=torch.int8), torch.empty(num_rows))


def assert_like_reference(name: str, x: torch.Tensor, width: int, *arguments) -> None:
    """Compare a kernel that makes rows, as numbers and as codes, with its reference."""
    outs = [torch.empty(len(x), width, dtype=x.dtype) for _ in range(2)]
    rows = [empty_rows(len(x), width) for _ in range(2)]
    for module, out, codes in zip((ops, reference), outs, rows, strict=True):
        getattr(module, name)(x, *arguments, out)
        getattr(module, name)(x, *arguments, codes)
    assert_close(*outs)
    torch.testing.assert_close(rows[0].scales, rows[1].scales, rtol=2e-6, atol=1e-30)
    assert int((rows[0].codes.int() - rows[1].codes.int()).abs().max()) <= 1  # a code half way may be either
    assert float((rows[0].codes != rows[1].codes).float().mean()) < 0.02


@given(
    st.integers(1, 40), st.integers(1, 30), st.sampled_from(DTYPES), st.integers(0, 100), st.integers(1, 3)
)
@settings(max_examples=40, deadline=None)
def test_rows_are_made_as_the_reference_makes_them(num_rows, eighths, dtype, seed, num_threads):
    before, width = torch.get_num_threads(), 8 * eighths
    torch.set_num_threads(num_threads)
    try:
        x = make((num_rows, width), dtype, seed)
        assert_like_reference("rms_norm", x, width, make((width,), dtype, seed + 1), 1e-5)
        gate_up = make((num_rows, 2 * width), dtype, seed) * 20  # far beyond where exp overflows
        assert_like_reference("silu_mul", gate_up, width)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("turned", [None, [1, 1], [0, 1]])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rotated_as_the_reference_rotates_them(dtype, head_dim, turned, normed):
    qkv = make((21, 7, head_dim), dtype, 1)
    angles = make((21, head_dim // 2), torch.float32, 2)
    kwargs = {"turn": key_turn(head_dim, turned)} if turned else {}
    if normed:
        kwargs["norms"] = reference.HeadNorms(make((head_dim,), dtype, 3), make((head_dim,), dtype, 4), 1e-5)
    actual, expected = qkv.clone(), qkv.clone()
    for module, x in ((ops, actual), (reference, expected)):
        module.rotate(x, 4, 2, angles.cos(), angles.sin(), **kwargs)
    assert_close(actual, expected)
    assert torch.equal(actual[:, 6:], qkv[:, 6:]) and not torch.allclose(actual[:, :6], qkv[:, :6])


def test_a_row_is_rounded_to_its_largest_number_and_poison_is_not_hidden():
    x = make((9, 24), torch.float32, 1)
    x[3], x[4, 5], x[5, 6], x[6] = 0, torch.nan, torch.inf, 1e-35
    rows = [empty_rows(9, 24) for _ in range(2)]
    ops.quantize_rows(x, rows[0])
    reference.quantize_rows(x, rows[1])
    good = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(rows[0].codes[good], rows[1].codes[good])
    assert torch.equal(rows[0].scales[good], rows[1].scales[good])
    assert all(not torch.isfinite(r.scales[[4, 5]]).any() for r in rows)
    restored = rows[0].codes[:3] * rows[0].scales[:3, None]
    assert bool(((restored - x[:3]).abs() <= x[:3].abs().amax(1, keepdim=True) / 254 * 1.0001).all())


def check_product(num_rows, width, depth, dtype, seed, bias, adds) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (num_rows, depth), generator=generator, dtype=torch.int8)
    x = Int8Rows(codes, torch.rand(num_rows, generator=generator))
    weight = make((width, depth), torch.float32, seed)
    weight[0] = 0
    bias = make((width,), torch.float32, seed) if bias else None
    outs = [make((num_rows, width), dtype, seed + 1) for _ in range(2)]
    for module, out in zip((ops, reference), outs, strict=True):
        module.int8_product(
            x, quantize_weight(weight, module.int8_panel(), module.int8_group()), out, bias=bias, adds=adds
        )
    assert torch.equal(*outs)


@given(
    num_rows=st.integers(1, 70),
    width=st.integers(1, 40).map(lambda n: 8 * n),
    depth=st.integers(1, 160).map(lambda n: 8 * n),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
    bias=st.booleans(),
    adds=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_int8_products_are_exactly_the_references(**case):
    check_product(**case)


def test_int8_sums_do_not_saturate():
    extreme = torch.full((5, 4096), 127, dtype=torch.int8)
    weight = quantize_weight(torch.full((8, 4096), -1.0), ops.int8_panel(), ops.int8_group())
    out = torch.empty(5, 8)
    ops.int8_product(Int8Rows(extreme, torch.ones(5)), weight, out)
    assert torch.equal(out, torch.full((5, 8), -127.0 * 127 * 4096) * weight.scales[:8])


@pytest.mark.parametrize(
    ("flag", "panel"),
    [("-DKVB_EMULATE_VNNI", 64)] + [("-march=x86-64", 16)] * ON_X86,
    ids=["vnni", "plain"][: 1 + ON_X86],
)
def test_int8_products_of_other_machines_are_exact_too(flag, panel, tmp_path, monkeypatch):
    """What runs on AVX-512-VNNI, its one instruction in plain C++, and without any vector extension."""
    folder = Path(ops.__file__).parent
    built = build.compile_and_load(build.find_compiler(), tmp_path, (flag,), sources=folder)
    monkeypatch.setattr(ops, "library", lambda: ops.LAYER_KERNELS.declared(built))
    assert ops.int8_panel() == panel
    check_product(9, 72, 80, torch.float32, 0, True, True)
    check_product(70, 136, 1096, torch.bfloat16, 1, False, False)


FLOAT, HALF = DTYPES
KINDS = [(FLOAT, FLOAT, FLOAT), (FLOAT, HALF, FLOAT), (HALF, HALF, HALF), (HALF, HALF, FLOAT)]


def check_float_product(num_rows, width, depth, kind, form, seed) -> torch.Tensor:
    """Compare a product of rows and weights of some types with exact ones, and each row with itself alone."""
    x_dtype, weight_dtype, out_dtype = kind
    x, weight = (
        make((n, depth), dtype, seed)
        for n, dtype in zip((num_rows, width), (x_dtype, weight_dtype), strict=True)
    )
    packed = pack_weight(weight, ops.float_panel(), weight_dtype)
    bias = make((width,), torch.float32, seed) if "bias" in form else None
    before = make((num_rows, width), out_dtype, seed + 1)

    def product(rows: slice) -> torch.Tensor:
        out = before[rows].clone()
        ops.float_product(x[rows], packed, out, bias=bias, adds="adds" in form)
        return out

    out, exact = product(slice(None)), before.double()
    reference.float_product(
        x.double(), packed, exact, bias=None if bias is None else bias.double(), adds="adds" in form
    )
    # what rounding each addition, and then the sum, can cost at most
    bound = 6e-8 * (depth + 3) * (x.float().abs() @ weight.float().abs().T + 20)
    bound += exact.abs() * torch.finfo(out_dtype).eps / 2 * 1.01
    assert bool(((out - exact).abs() <= bound).all())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(product(slice(None)), out)
    finally:
        torch.set_num_threads(num_threads)
    row = seed % num_rows
    for rows in (slice(row, row + 1), slice(row, row + 9)):
        assert torch.equal(product(rows), out[rows])
    assert torch.equal(packed.dense(), weight.float())
    index = torch.tensor([0, width - 1, width // 2])
    assert torch.equal(packed.rows(index), weight[index])
    return out


@rows_are_alike
@given(
    num_rows=st.integers(1, 210),
    width=st.integers(1, 330),
    depth=st.integers(1, 650).map(lambda n: 2 * n),
    kind=st.sampled_from(KINDS),
    form=st.sampled_from(("", "bias", "adds", "adds bias")),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_products_are_exact_but_for_rounding_and_a_row_is_the_same_among_any(**case):
    check_float_product(**case)


@rows_are_alike
@pytest.mark.skipif(not ON_X86, reason="x86 flags")
@pytest.mark.parametrize("flag", ["-mno-avx512bf16", "-mno-avx512f"])
def test_products_of_lesser_machines_are_as_exact_and_those_of_float32_the_same(flag, tmp_path, monkeypatch):
    """What runs without the instruction for bfloat16, and what runs on AVX2."""
    shapes = [(1, 40, 64), (29, 331, 1300), (130, 64, 600)]
    cases = [(*shape, kind, form, 3) for shape in shapes for kind in KINDS for form in ("bias", "adds")]
    native = [check_float_product(*case) for case in cases]
    built = build.compile_and_load(
        build.find_compiler(), tmp_path, (flag,), sources=Path(ops.__file__).parent
    )
    monkeypatch.setattr(ops, "library", lambda: ops.LAYER_KERNELS.declared(built))
    found = [check_float_product(*case) for case in cases]
    for out, expected, (_, _, _, (x_dtype, *_), *_) in zip(found, native, cases, strict=True):
        assert x_dtype == HALF or torch.equal(out, expected)


def test_weights_come_back_as_they_were_packed():
    weight = make((40, 24), torch.float32, 0)
    packed = quantize_weight(weight, 16, 4)
    assert packed.shape == (40, 24) and packed.codes.shape == (3, 6, 16, 4)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((packed.dense() - weight).abs() <= step * 0.5001).all())


@pytest.mark.parametrize("turned", [None, [1, 1], [0, 1]])
@pytest.mark.parametrize(("dtype", "weight_quant"), [(d, w) for d in DTYPES for w in (None, "int8")])
@pytest.mark.parametrize(("name", "has_bias"), [("llama", True), ("qwen3", False)])
def test_compiled_passes_are_the_kernels_one_by_one(tmp_path, name, has_bias, dtype, weight_quant, turned):
    biases = {"attention_bias": True, "mlp_bias": True} if has_bias else {}
    save_tiny_model(tmp_path, name, **biases)
    decoder = load_model(tmp_path, dtype=dtype, weight_quant=weight_quant)
    config, layers = decoder.config, decoder._weights.layers
    turns = [None] * config.num_layers
    if turned:  # in the second layer, another way
        turns[:2] = [key_turn(config.head_dim, row) for row in (turned, turned[::-1])]
    if not can_compile(config, layers, turns):
        assert weight_quant is None and not float_panel(ops, dtype)
        pytest.skip("torch multiplies these here")
    compiled, plain = CompiledPasses(config, layers, turns), Passes(config, layers, ops, turns)
    for num_tokens in (19, 3, 40):  # less and more than there was room for
        angles = make((num_tokens, config.head_dim // 2), torch.float32, 1)
        hidden = [make((num_tokens, config.hidden_size), dtype, 2) for _ in range(2)]
        for layer in range(config.num_layers):
            heads = [
                [part.clone() for part in passes.before_attention(layer, x, angles.cos(), angles.sin())]
                for passes, x in zip((compiled, plain), hidden, strict=True)
            ]
            assert all(map(torch.equal, *heads))
            for count in (0, 2, num_tokens):  # of a step's last layer only some rows go on
                outs = [x[:count] for x in hidden]
                for passes, x in zip((compiled, plain), outs, strict=True):
                    passes.after_attention(layer, x, heads[0][0][:count].flatten(1))
                assert torch.equal(*outs)
