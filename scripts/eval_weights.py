"""Print what int8 weights cost: the perplexity of a text with the model's own weights and with quantized ones.

    eval_weights.py --model MODEL --text text.txt --tokens 16384

The text is read in windows, each for itself, and every token but a window's first is predicted.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from engine.models import Decoder, load_model
from engine.models.basis import PLAIN, ROTATED
from kvbatch.model.precision import choose_precision
from kvbatch.model.source import resolve_model
from kvcache.kernels.protocol import PrefillOptions
from kvcache.kernels.registry import kernels_for
from kvcache.sizes.page_format import PageFormat


@torch.inference_mode()
def negative_log_likelihood(model: Decoder, tokens: Tensor) -> float:
    """Return the sum over a window's tokens but the first, in nats."""
    head_dim = model.config.head_dim
    kernels = kernels_for(model.device, PageFormat(16, 16, 16, head_dim))
    options = PrefillOptions(head_dim**-0.5, num_threads=torch.get_num_threads())

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out = kernels.prefill_attention(q, None, keys, values, options)
        return out[0].to(q.dtype)

    hidden = model.forward(tokens, torch.arange(len(tokens)), attend)[:-1]
    parts = zip(hidden.split(256), tokens[1:].split(256), strict=True)
    return sum(float(F.cross_entropy(model.logits(h), t, reduction="sum")) for h, t in parts)


def main() -> None:
    """Measure both and print a line for each."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        required=True,
        help="as model.path of a job: directory, .gguf file, hub id, pypi:package==version",
    )
    p.add_argument("--text", type=Path, required=True, help="UTF-8 text")
    p.add_argument("--tokens", type=int, default=16384, help="tokens read (default 16384)")
    p.add_argument("--window", type=int, default=1024, help="tokens of a window (default 1024)")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    args = p.parse_args()
    args.model = resolve_model(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids[: args.tokens // args.window * args.window]).split(args.window)
    num_predicted = sum(len(window) - 1 for window in windows)
    means = []
    for quant in (None, "int8"):
        model = load_model(
            args.model,
            dtype=getattr(torch, choose_precision(args.dtype, "cpu").dtype),
            weight_quant=quant,
            basis=ROTATED if quant else PLAIN,
        )
        means.append(sum(negative_log_likelihood(model, window) for window in windows) / num_predicted)
        name = quant or str(model.dtype).removeprefix("torch.")
        print(
            f"{name:10} perplexity {math.exp(means[-1]):8.3f} ({means[-1] - means[0]:+.4f} nats a token, "
            f"{math.exp(means[-1] - means[0]) - 1:+.2%}), {model.weight_bytes:,} bytes"
        )


if __name__ == "__main__":
    main()
