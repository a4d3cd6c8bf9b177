"""The decoder: token ids to hidden states to logits, for every supported architecture.

It knows nothing of caches or sequences: all tokens of a step lie in one flat row, and the caller's `attend`
does the attention of each layer. Elementwise work happens in place in one workspace, kept between calls:
fresh memory costs page faults, which on a CPU are dearer than the arithmetic.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.rope import rope_tables
from engine.models.weights import LayerWeights, Projection, Weights, load_weights

# attend(layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> [T, H, D]; q and k after qk-norm and rope
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A model ready to run. One thread uses it at a time, since calls share the workspace."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Take loaded weights and prepare the rope tables for the whole context."""
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.weight_bytes = sum(tensor.nbytes for tensor in _tensors(weights))
        self._weights = weights
        self._cos, self._sin = rope_tables(config.rope, config.max_context, self.device)
        self._workspace: dict[str, Tensor] = {}

    @property
    def output_weights(self) -> list[Tensor]:
        """The attention's output projection of every layer, `[hidden, H D]`."""
        return [layer.output.weight for layer in self._weights.layers]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, each below config.max_context
        attend: Attend,
        rows: Tensor | None = None,  # [N] int64, the tokens whose hidden states are wanted; None: all
    ) -> Tensor:  # [N, hidden], after the final norm
        """Run all layers over the tokens of one step.

        The last layer goes on with the wanted rows alone: of a prompt's chunk nothing is needed there but keys
        and values, which saves nearly a layer of a prompt's work.

        Args:
            attend: Called once a layer, in order. Its q, k and v are views of the workspace, overwritten by
                the next layer: copy what must stay.
        """
        config, num_tokens = self.config, token_ids.shape[0]
        eps = config.norm_eps
        cos = self._cos[positions].to(self.dtype).unsqueeze(1)  # [T, 1, D / 2]
        sin = self._sin[positions].to(self.dtype).unsqueeze(1)
        hidden = F.embedding(token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            normed = F.rms_norm(hidden, (config.hidden_size,), layer.attention_norm, eps)
            q, k, v = self._qkv(normed, layer, cos, sin)
            attended = attend(index, q, k, v).reshape(num_tokens, -1)
            if rows is not None and index == config.num_layers - 1:
                hidden, attended = hidden[rows], attended[rows]
            _add_projected(hidden, attended, layer.output)
            normed = F.rms_norm(hidden, (config.hidden_size,), layer.mlp_norm, eps)
            gate, up = self._project("gate_up", normed, layer.gate_up).chunk(2, dim=-1)
            _add_projected(hidden, F.silu(gate, inplace=True).mul_(up), layer.down)
        return F.rms_norm(hidden, (config.hidden_size,), self._weights.norm, eps)

    def checksums(self) -> list[float]:
        """Return the sum of every weight tensor, which tells models of one shape apart."""
        return [float(tensor.sum(dtype=torch.float64)) for tensor in _tensors(self._weights)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:  # [N, hidden] -> float32 [N, vocab]
        """Return the scores of every vocabulary entry for each row."""
        return F.linear(hidden, self._weights.head).float()

    def _qkv(
        self, normed: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = self._project("qkv", normed, layer.qkv).unflatten(-1, (-1, config.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(F.rms_norm(q, (config.head_dim,), layer.q_norm, config.norm_eps))
            k.copy_(F.rms_norm(k, (config.head_dim,), layer.k_norm, config.norm_eps))
        self._rotate(qkv[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return q, k, v

    def _rotate(self, qk: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q and k in place, both at once: (a, b) -> (a cos - b sin, b cos + a sin)."""
        first, second = qk.chunk(2, dim=-1)  # [T, H + KVH, D / 2] each
        crossed = torch.mul(first, sin, out=self._buffer("rotate", first.shape))
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(crossed)

    def _project(self, name: str, x: Tensor, projection: Projection) -> Tensor:
        """Multiply into the workspace: [T, in] -> [T, out].

        Dense weights stay as loaded, since no other form was clearly faster. SmolLM2-135M's shapes in
        float32, one AVX2 core of a busy machine, GFLOP/s at 256 and 512 tokens | at 12 tokens: mm(out=)
        78 to 92 | 48 to 59, linear 79 to 90 | 37 to 55, a transposed copy 81 to 93 | 39 to 60, MKL's
        packed weights 79 to 92 | 37 to 54, oneDNN's 73 to 82 | 39 to 55 (two other runs had oneDNN ahead
        at 12 on gate-up, by 7 and 29 %). The one clear gain is the vocabulary's matrix at 2 to 32 rows
        (12 rows: 26 ms dense, 16 ms by oneDNN); it is left, for the packed copy would double a tied
        embedding.
        """
        out = self._buffer(name, (x.shape[0], projection.weight.shape[0]))
        if projection.bias is None:
            return torch.mm(x, projection.weight.t(), out=out)
        return torch.addmm(projection.bias, x, projection.weight.t(), out=out)

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the first rows of a workspace tensor, which grows to the largest step seen."""
        held = self._workspace.get(name)
        if held is None or held.shape[0] < shape[0]:
            self._workspace[name] = held = torch.empty(shape, dtype=self.dtype, device=self.device)
        return held[: shape[0]]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    max_context: int | None = None,
    trust_remote_code: bool = False,
) -> Decoder:
    """Load the model of a local directory.

    Raises:
        UnsupportedModelError: the engine cannot run it; the message names why.
        ModelError: its files are missing, corrupt or contradict each other.
    """
    config = ModelConfig.from_pretrained(path, max_context=max_context, trust_remote_code=trust_remote_code)
    return Decoder(config, load_weights(Path(path), config, dtype=dtype, device=torch.device(device)))


def _add_projected(residual: Tensor, x: Tensor, projection: Projection) -> None:
    residual.addmm_(x, projection.weight.t())  # the GEMM adds into the residual: no pass of its own
    if projection.bias is not None:
        residual.add_(projection.bias)


def _tensors(weights: Weights) -> list[Tensor]:
    """Return every tensor of the weights, a tied one once."""
    tensors = [weights.embedding, weights.norm]
    if weights.head is not weights.embedding:
        tensors.append(weights.head)
    for layer in weights.layers:
        for part in vars(layer).values():
            tensors += vars(part).values() if isinstance(part, Projection) else (part,)
    return [tensor for tensor in tensors if tensor is not None]
