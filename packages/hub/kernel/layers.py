# SPDX-License-Identifier: MIT
"""Layers for `kernelize`, which puts their forward into a model's own modules: `self` is the module of the model, with its
weight and eps. So they have no state and no other members."""
import torch
from torch import nn

from .functional import rms_norm


def _eps(module):
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


class LkRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in the type of x: transformers' LlamaRMSNorm and those alike, torch.nn.RMSNorm. It
    is rounded once; Llama's own rounds before the product with weight, too."""
    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight.shape, self.weight, _eps(self))


class LkGemmaRMSNorm(nn.Module):
    """The same with 1 + weight: Gemma's norms."""
    has_backward = True
    can_torch_compile = True
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight.shape, self.weight, _eps(self), weight_offset=1.0)
