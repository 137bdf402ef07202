"""Sequence parallel: between split layers, each rank keeps the activations of its own tokens.

Problem: between the layers that `ringcoll.training.split.tensor` splits (layer norms, the ways
around) every rank would do the same work on the same activations. Instead each rank keeps the
activations of its share of the tokens; `gathered_to_add` enters a split layer in place of `copied`,
and `reduced_and_split` leaves it in place of `reduced`. As many bytes travel, and 1/k of those
activations is kept.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys
2023.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ringcoll.training.models import Transformer
from ringcoll.training.split import conjugate


class SharedNorm(nn.Module):
    """A layer norm of which each rank applies a copy to its own tokens."""

    def __init__(self, whole: nn.LayerNorm, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().clone())
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(whole.bias.detach().clone())
        self._eps, self._group = whole.eps, group

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tokens / k, width) to the same."""
        weight = conjugate.copied(self.weight, self._group)
        bias = None if self.bias is None else conjugate.copied(self.bias, self._group)
        return functional.layer_norm(inputs, weight.shape, weight, bias, self._eps)


def keep_own_tokens(model: Transformer, group: Any) -> None:
    """Let each rank keep its own tokens from the embedding to the scores, in place."""
    model.embedding.register_forward_hook(
        lambda _, inputs, output: conjugate.split(output, group, 1)
    )
    model.head.scores.register_forward_pre_hook(
        lambda _, inputs: (conjugate.gathered(inputs[0], group, 1),)
    )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.LayerNorm) and child.elementwise_affine:
                setattr(module, name, SharedNorm(child, group))
