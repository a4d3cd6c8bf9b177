"""Measure every CPU kernel against torch and against what the machine can do, as a table or as JSON.

Prefill is measured in GFLOP/s of its two products beside torch's scaled_dot_product_attention over dense keys and
values, the layers' matrix products beside torch.mm; their ceiling is a square product of 1,024 in the same dtype, by
torch or by kvbatch, whichever is faster. The other kernels are measured in GB/s of what they read, or, unpacking,
write; their ceiling is a copy of more memory than the caches hold, reading and writing counted.
Contenders run in turn, a row's figures in the same seconds, and the best of each counts, so other work on the machine
hurts them alike. In rows of GB/s the copy between two turns leaves nothing of theirs in the caches: what decode reads
comes from memory, and its pages lie in random order. With one thread the time is the processor's, which leaves out what
others took of it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels import ops as layer_ops
from engine.kernels.int8 import Int8Rows, quantize_weight
from engine.kernels.packed import pack_weight
from kvbatch.model.precision import choose_precision
from kvcache.kernels import reference
from kvcache.kernels.cpu import build, ops
from kvcache.kernels.page_table import PageTable
from kvcache.kernels.page_tokens import PageTokens
from kvcache.kernels.protocol import PrefillOptions
from kvcache.quantize.pages import quantize_pages
from kvcache.sizes.page_format import PageFormat

PAGE_TOKENS = 64
KERNELS = ("product", "prefill", "decode", "quantize", "unpack")
LAYER_SHAPES = {  # depth and width of a layer's matrices
    "135M qkv": (576, 960),
    "135M gate and up": (576, 3072),
    "135M down": (1536, 576),
    "0.5B output": (896, 896),
    "0.5B gate and up": (896, 9728),
    "0.5B down": (4864, 896),
}
NUM_MATRICES = 24  # of a layer, one after the other: more than the caches hold


@dataclass(frozen=True)
class Row:
    """One kernel's rate beside torch's and the ceiling, all in `unit`."""

    kernel: str
    unit: str
    kvbatch: float
    torch: float
    ceiling: float


class Bench:
    """Measure with the shapes and the time that the command line gives."""

    def __init__(self, args: argparse.Namespace):
        self.tokens, self.chunk, self.rows = args.tokens, args.chunk, args.rows
        self.heads, self.lanes, self.dim = args.heads, args.kv_heads, args.head_dim
        self.dtype, self.seconds, self.threads = args.dtype, args.seconds, args.threads
        self.formats = {
            "float32 pages": PageFormat(16, 16, PAGE_TOKENS, self.dim, 4),
            "bfloat16 pages": PageFormat(16, 16, PAGE_TOKENS, self.dim, 2),
        } | {
            f"{name}-bit pages": PageFormat(*bits, PAGE_TOKENS, self.dim)
            for name, bits in {"8": (8, 8), "4": (4, 4), "3/2": (3, 2)}.items()
        }
        side = 1024
        self._factors = torch.randn(2, side, side).to(self.dtype)
        self._product_flop = 2 * side**3
        panel = layer_ops.float_panel()
        self._packed = pack_weight(self._factors[1].contiguous(), panel, self.dtype) if panel else None
        self._memory = torch.zeros(2, 32 * 2**20)  # 128 MiB each

    def rows_of(self, kernels: Sequence[str]) -> Iterator[Row]:
        packed = [name for name, kind in self.formats.items() if not kind.whole]
        for num_rows in (self.rows, self.chunk, 1024) if "product" in kernels else ():
            for weights in (
                sorted({self.dtype, torch.bfloat16}, key=str, reverse=True) if self._packed else ()
            ):
                yield self.product(num_rows, weights)
            yield self.int8_product(num_rows)
        for name, shape in LAYER_SHAPES.items() if "layers" in kernels and self._packed else ():
            for num_rows in (1, 4, 16, 256, 512, 1024):
                yield self.layer_product(name, num_rows, *shape)
        if "prefill" in kernels:
            yield self.whole_prompt()
        for kernel, measure, names in (
            ("prefill", self.prefill_chunk, self.formats),
            ("decode", self.decode, self.formats),
            ("quantize", self.quantize, packed),
            ("unpack", self.unpack, packed),
        ):
            for name in names if kernel in kernels else ():
                yield measure(name)

    def product(self, num_rows: int, dtype: torch.dtype) -> Row:
        """Measure rows by weights kept in a type; torch gets them in the rows'."""
        x, out, weights = self._layers(num_rows)
        packed = [pack_weight(weight, layer_ops.float_panel(), dtype) for weight in weights]
        return self._products(
            f"product, {num_rows:,} rows, {str(dtype).removeprefix('torch.')} weights",
            (x, out, weights),
            lambda: [layer_ops.float_product(x, weight, out) for weight in packed],
        )

    def layer_product(self, name: str, num_rows: int, depth: int, width: int) -> Row:
        """Measure rows by a matrix of some model, of one type and read from memory where rows are few."""
        count = 4 if num_rows > 16 else max(4, 2**27 // (depth * width * self.dtype.itemsize))
        x, out = (torch.randn(num_rows, n).to(self.dtype) for n in (depth, width))
        weights = [torch.randn(width, depth).to(self.dtype) for _ in range(count)]
        packed = [pack_weight(weight, layer_ops.float_panel(), self.dtype) for weight in weights]
        return self._products(
            f"{name}, {num_rows:,} rows",
            (x, out, weights),
            lambda: [layer_ops.float_product(x, weight, out) for weight in packed],
        )

    def int8_product(self, num_rows: int) -> Row:
        """Measure what multiplies codes; torch gets numbers."""
        x, out, weights = self._layers(num_rows)
        codes = Int8Rows(torch.empty(x.shape, dtype=torch.int8), torch.empty(num_rows))
        layer_ops.quantize_rows(x, codes)
        panel, group = layer_ops.int8_panel(), layer_ops.int8_group()
        packed = [quantize_weight(weight, panel, group) for weight in weights]
        return self._products(
            f"product, {num_rows:,} rows, int8 weights",
            (x, out, weights),
            lambda: [layer_ops.int8_product(codes, weight, out) for weight in packed],
        )

    def _layers(self, num_rows: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return rows, room for their products, and matrices four times as wide as deep."""
        depth = self.heads * self.dim
        x, out = torch.randn(num_rows, depth), torch.empty(num_rows, 4 * depth)
        weights = torch.randn(NUM_MATRICES, 4 * depth, depth)
        return x.to(self.dtype), out.to(self.dtype), list(weights.to(self.dtype))

    def _products(self, kernel: str, given: tuple[Tensor, Tensor, list[Tensor]], ours: Callable) -> Row:
        x, out, weights = given
        flop = 2 * out.numel() * x.shape[1] * len(weights)
        return self._arithmetic(kernel, flop, ours, lambda: [torch.mm(x, w.t(), out=out) for w in weights])

    def whole_prompt(self) -> Row:
        q = torch.randn(self.tokens, self.heads, self.dim).to(self.dtype)
        keys, values = torch.randn(2, self.lanes, self.tokens, self.dim).to(self.dtype)
        dense = self._dense(keys, values)
        return self._arithmetic(
            f"prefill, prompt of {self.tokens:,}",
            self._attention_flop(self.tokens * (self.tokens + 1) / 2),
            lambda: ops.prefill_attention(
                q, None, keys, values, PrefillOptions(self.dim**-0.5, num_threads=self.threads)
            ),
            lambda: scaled_dot_product_attention(q.transpose(0, 1)[None], *dense, is_causal=True),
        )

    def prefill_chunk(self, name: str) -> Row:
        """Measure a chunk behind pages; torch gets them dense, and need not mask the chunk.

        All but float32 pages are multiplied as the engine does it, rounded where integers are faster.
        """
        kind = self.formats[name]
        table, rounds = self._table(kind, 1), kind.whole_bytes == 2 or not kind.whole
        past = int(table.tokens[0, 0])
        q = torch.randn(self.chunk, self.heads, self.dim).to(self.dtype)
        keys, values = torch.randn(2, self.lanes, self.chunk, self.dim).to(self.dtype)
        older = torch.randn(2, self.lanes, past, self.dim).to(self.dtype)
        dense = self._dense(torch.cat([older[0], keys], 1), torch.cat([older[1], values], 1))
        return self._arithmetic(
            f"prefill, {self.chunk} behind {name}",
            self._attention_flop(self.chunk * (past + (self.chunk + 1) / 2)),
            lambda: ops.prefill_attention(
                q, table, keys, values, PrefillOptions(self.dim**-0.5, rounds, self.threads)
            ),
            lambda: scaled_dot_product_attention(q.transpose(0, 1)[None], *dense),
        )

    def decode(self, name: str) -> Row:
        """Measure rows that all look at their own pages; torch's are dense, of as many tokens, in the same dtype."""
        table = self._table(self.formats[name], self.rows)
        q = torch.randn(self.rows, self.heads, self.dim).to(self.dtype)
        tokens = int(table.tokens[0, 0])
        keys, values = torch.randn(2, self.rows, self.lanes, tokens, self.dim).to(self.dtype)
        folded = q.view(self.rows, self.lanes, -1, self.dim)
        return self._traffic(
            f"decode, {self.rows} rows, {name}",
            len(table.addresses) * self.formats[name].page_bytes,
            lambda: ops.decode_attention(q, table, scale=self.dim**-0.5, num_threads=self.threads),
            lambda: scaled_dot_product_attention(folded, keys, values),
        )

    def quantize(self, name: str) -> Row:
        kind = self.formats[name]
        numbers = torch.randn(2, self.lanes * self.tokens // PAGE_TOKENS, PAGE_TOKENS, self.dim)
        rows = PageTokens.of_pages(*numbers)
        return self._traffic(
            f"quantize, {name}",
            numbers.nbytes,
            lambda: ops.quantize(rows, kind, num_threads=self.threads),
            lambda: reference.quantize(rows, kind),
        )

    def unpack(self, name: str) -> Row:
        table = self._table(self.formats[name], 1)
        out = torch.empty(2, int(table.tokens.sum()), self.dim)
        return self._traffic(
            f"unpack, {name}",
            out.nbytes,
            lambda: ops.dequantize(table, out=out.unbind(), num_threads=self.threads),
            lambda: reference.dequantize(table, out=out.unbind()),
        )

    def _table(self, kind: PageFormat, num_sequences: int) -> PageTable:
        shape = (self.lanes, max(1, self.tokens // PAGE_TOKENS))
        per_sequence = shape[0] * shape[1]
        rows = torch.randn(2, per_sequence, PAGE_TOKENS, self.dim)
        slab = quantize_pages(*rows, kind).flatten().repeat(num_sequences)
        numbers = torch.randperm(per_sequence * num_sequences).view(num_sequences, *shape)
        full = torch.full(shape, PAGE_TOKENS)
        return PageTable.of(slab, [[(kind, n * kind.page_units, full)] for n in numbers])

    def _dense(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return keys and values `[1, H, N, D]`, each query head's own."""
        return [x.repeat_interleave(self.heads // self.lanes, 0)[None] for x in (keys, values)]

    def _attention_flop(self, pairs: float) -> float:
        """Return what looking at so many pairs of query and key takes."""
        return 4 * pairs * self.heads * self.dim

    def _arithmetic(self, kernel: str, flop: float, ours: Callable, theirs: Callable) -> Row:
        x, out = self._factors[0], torch.empty_like(self._factors[0])
        ceilings = [lambda: torch.mm(x, self._factors[1].t(), out=out)]
        if self._packed:
            ceilings.append(lambda: layer_ops.float_product(x, self._packed, out))
        our_s, their_s, *ceilings_s = self._race(ours, theirs, *ceilings)
        rates = (flop / our_s, flop / their_s, self._product_flop / min(ceilings_s))
        return Row(kernel, "GFLOP/s", *(rate / 1e9 for rate in rates))

    def _traffic(self, kernel: str, num_bytes: int, ours: Callable, theirs: Callable) -> Row:
        """Measure what moves so many bytes; torch is given as many for the same work."""
        times = self._race(ours, theirs, lambda: self._memory[0].copy_(self._memory[1]))
        work = (num_bytes, num_bytes, self._memory.nbytes)
        return Row(kernel, "GB/s", *(w / t / 1e9 for w, t in zip(work, times, strict=True)))

    def _race(self, *contenders: Callable) -> list[float]:
        """Return each contender's best time in seconds; all get as many turns."""
        clock = time.process_time if self.threads == 1 else time.perf_counter
        best = [float("inf")] * len(contenders)
        end = time.perf_counter() + self.seconds
        turns = 0
        while turns < 3 or time.perf_counter() < end:
            for n, call in enumerate(contenders):
                start = clock()
                call()
                best[n] = min(best[n], clock() - start)
            turns += 1
        return best


HEADER = "| kernel | unit | kvbatch | torch | ceiling | of torch | of ceiling |\n" + "|---" * 7 + "|"


def as_line(row: Row) -> str:
    """Return a line of the Markdown table."""
    rates = (f"{rate:.1f}" for rate in (row.kvbatch, row.torch, row.ceiling))
    ratios = (f"{row.kvbatch / row.torch:.2f}", f"{row.kvbatch / row.ceiling:.0%}")
    return f"| {' | '.join((row.kernel, row.unit, *rates, *ratios))} |"


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="+", choices=(*KERNELS, "layers"), help="measure these kernels")
    p.add_argument("--tokens", type=int, default=7000, help="of the prompt and of each lane")
    p.add_argument("--chunk", type=int, default=256, help="tokens that attend at once")
    p.add_argument("--rows", type=int, default=8, help="that decode at once")
    p.add_argument("--heads", type=int, default=9)
    p.add_argument("--kv-heads", type=int, default=3)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument(
        "--dtype", default="auto", help="of queries: float32, bfloat16, or auto, as a job takes it"
    )
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--seconds", type=float, default=3, help="per row of the table")
    p.add_argument("--json", type=Path, help="write the figures here too")
    args = p.parse_args()
    args.dtype = getattr(torch, choose_precision(args.dtype, "cpu").dtype)
    return args


def main() -> None:
    args = _arguments()
    if build.library() is None or layer_ops.library() is None:
        sys.exit("there are no kernels to measure")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = {
        "dtype": str(args.dtype).removeprefix("torch."),
        "threads": args.threads,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    print(*(f"{name} {value}" for name, value in facts.items()), sep=", ", end="\n\n")
    print(HEADER, flush=True)
    rows = []
    for row in Bench(args).rows_of(args.only or KERNELS):
        rows.append(asdict(row))
        print(as_line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
