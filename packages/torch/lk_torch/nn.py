# SPDX-License-Identifier: MIT
"""Modules over functional.py. Their parameters have the names of PyTorch's, so state_dicts can be exchanged."""
import math

import torch

from . import functional as LF


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by lk. The factor is weight_offset + weight. With Gemma's weight_offset, 1, weight begins at
    0.

    bias and groups: as in functional.rms_norm, which has weight and bias of [groups, *normalized_shape]."""

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *, bias=False,
                 weight_offset=0.0, groups=1):
        self.weight_offset, self.groups = LF._number("weight_offset", weight_offset), LF._integer("groups", groups)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        shape = self.normalized_shape if self.groups == 1 else (self.groups, *self.normalized_shape)
        empty = lambda: torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if elementwise_affine and self.groups != 1:
            self.weight = empty()
        self.register_parameter("bias", empty() if bias else None)
        self.reset_parameters()

    def reset_parameters(self):
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if getattr(self, "bias", None) is not None:
            torch.nn.init.zeros_(self.bias)

    def _more(self):
        return dict(bias=self.bias, weight_offset=self.weight_offset, groups=self.groups)

    def forward(self, x):
        return LF.rms_norm(x, self.normalized_shape, self.weight, self.eps, **self._more())

    def extra_repr(self):
        more = dict(bias=self.bias is not None, weight_offset=self.weight_offset, groups=self.groups)
        return super().extra_repr() + "".join(f", {k}={v}" for k, v in more.items() if v and (k, v) != ("groups", 1))


class AddRMSNorm(RMSNorm):
    """s = x + residual; returns (RMSNorm(s), s). round_sum: as in functional.add_rms_norm."""

    round_sum = False  # of modules that were pickled before there was such a thing

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *, bias=False,
                 weight_offset=0.0, groups=1, round_sum=False):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, bias=bias, weight_offset=weight_offset, groups=groups)
        self.round_sum = bool(round_sum)

    def forward(self, x, residual):
        return LF.add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, round_sum=self.round_sum, **self._more())

    def extra_repr(self):
        return super().extra_repr() + (", round_sum=True" if self.round_sum else "")


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) * silu(gate), or with gate_first=True RMSNorm(x * silu(gate)), as Mamba-2 and Gated DeltaNet have it; without bias."""

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None, *, weight_offset=0.0, groups=1,
                 gate_first=False):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, weight_offset=weight_offset, groups=groups)
        self.gate_first = bool(gate_first)

    def forward(self, x, gate):
        return LF.rms_norm(x, self.normalized_shape, self.weight, self.eps, gate=gate, gate_first=self.gate_first, **self._more())

    def extra_repr(self):
        return super().extra_repr() + (", gate_first=True" if self.gate_first else "")


class SRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, without weight."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return LF.srms_norm(x, self.eps)

    def extra_repr(self):
        return f"eps={self.eps}"


class GLU(torch.nn.Module):
    """functional.glu, with its options.

    torch.nn.GLU(x) is GLU("sigmoid")(x[..., n:], x[..., :n]): PyTorch's own takes the gate from the second half."""

    def __init__(self, activation="silu", *, alpha=1.0, limit=None, up_offset=0.0, interleaved=False):
        super().__init__()
        LF._value(LF._GATES, "activation", activation)
        self.activation = activation
        self.options = dict(alpha=LF._number("alpha", alpha), limit=None if limit is None else LF._number("limit", limit),
                            up_offset=LF._number("up_offset", up_offset), interleaved=bool(interleaved))

    def forward(self, gate, up=None, row_weight=None):
        return LF.glu(gate, up, self.activation, row_weight=row_weight, **self.options)

    def extra_repr(self):
        plain = dict(alpha=1.0, limit=None, up_offset=0.0, interleaved=False)
        return ", ".join([repr(self.activation), *(f"{k}={v}" for k, v in self.options.items() if v != plain[k])])


class _Loss(torch.nn.Module):
    """Of its options, a Parameter is one of the module, a learned logit_scale say, and another tensor moves with the module."""

    def _take(self, options):
        tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        for name, value in tensors.items():
            if isinstance(value, torch.nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value, persistent=False)
        self.options, self.tensors = {k: v for k, v in options.items() if k not in tensors}, tuple(tensors)

    def _all(self):
        return {**self.options, **{name: getattr(self, name) for name in self.tensors}} if self.tensors else self.options


class CrossEntropyLoss(_Loss):
    """torch.nn.CrossEntropyLoss, of class numbers or probabilities; the loss is float32."""

    def __init__(self, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, *, z_loss=0.0, softcap=0.0,
                 logit_scale=1.0, zero_when_empty=False, temperature=1.0, inplace=False):
        super().__init__()
        self.register_buffer("weight", weight)
        self._take(dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
                        softcap=softcap, logit_scale=logit_scale, zero_when_empty=zero_when_empty, temperature=temperature,
                        inplace=inplace))

    def forward(self, input, target, denominator=None, grad_scale=None, row_weight=None):
        return LF.cross_entropy(input, target, self.weight, denominator=denominator, grad_scale=grad_scale,
                                row_weight=row_weight, **self._all())

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class _Head(_Loss):
    """A torch.nn.Linear and a loss of its outputs."""

    def _make(self, function, in_features, num_classes, bias, device, dtype, options):
        late = {"linear_bias", "teacher_bias", "weight", "denominator", "grad_scale", "row_weight"}  # of forward, or parameters
        unknown = set(options) - set(function.__kwdefaults__) | set(options) & late
        if unknown:
            raise TypeError(f"lk: {type(self).__name__} has no option {', '.join(sorted(unknown))}")
        self.weight = torch.nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(num_classes, device=device, dtype=dtype)) if bias else None
        self._take(options)
        self.reset_parameters()

    def reset_parameters(self):  # as torch.nn.Linear
        bound = 1 / math.sqrt(self.weight.shape[1])
        for p in (self.weight,) if self.bias is None else (self.weight, self.bias):
            torch.nn.init.uniform_(p, -bound, bound)

    def extra_repr(self):
        sizes = f"in_features={self.weight.shape[1]}, num_classes={self.weight.shape[0]}, bias={self.bias is not None}"
        return ", ".join([sizes, *(f"{name}={value!r}" for name, value in self.options.items())])

    def __getstate__(self):
        """A group is copied, and pickled, by its name: in another process it is the group of that name, or its name alone."""
        state = super().__getstate__()
        group = self.options.get("group")
        name = getattr(group, "group_name", group)
        return state if group is None else {**state, "options": {**self.options, "group": name}}

    def __setstate__(self, state):
        super().__setstate__(state)
        if isinstance(self.options.get("group"), str):
            try:
                group = torch.distributed.distributed_c10d._resolve_process_group(self.options["group"])
                self.options = {**self.options, "group": group}
            except RuntimeError:
                pass  # the first call says it


class LinearCrossEntropyLoss(_Head):
    """A language model's head: a torch.nn.Linear and its cross entropy. Tie weights by `loss.weight = embedding.weight`.

    options: those of functional.linear_cross_entropy. With group, num_classes are this rank's, and class_weight has all."""

    def __init__(self, in_features, num_classes, bias=False, *, class_weight=None, device=None, dtype=None, **options):
        super().__init__()
        self._make(LF.linear_cross_entropy, in_features, num_classes, bias, device, dtype, options)
        self.register_buffer("class_weight", class_weight)

    def forward(self, input, target, denominator=None, grad_scale=None, row_weight=None):
        return LF.linear_cross_entropy(input, self.weight, target, linear_bias=self.bias, weight=self.class_weight,
                                       denominator=denominator, grad_scale=grad_scale, row_weight=row_weight, **self._all())

    def logits(self, input):
        """Those that the loss is of, in input's type: with logit_scale, softcap and temperature. With group: of this rank's
        classes. With sequence_parallel: give it the input of all tokens."""
        o = {"softcap": None, "logit_scale": 1.0, "temperature": 1.0, **self._all()}
        z = torch.nn.functional.linear(input, self.weight, self.bias)
        *_, cap, scale, factor = LF._options(0.0, 0.0, o["softcap"], o["logit_scale"], o["temperature"])
        if not cap and scale == 1.0 and factor is None:
            return z
        y = z.float() * scale
        if factor is not None:
            y = y * LF._per_row(factor, y.shape[:-1])
        return (cap * torch.tanh(y / cap) if cap else y).to(z.dtype)


class LinearKLLoss(_Head):
    """A student's head, torch.nn.Linear(in_features, num_classes), and its divergence from a teacher's. Tie weights by
    `loss.weight = head.weight`.

    options: those of functional.linear_kl. The teacher's tensors come with each call, so that they are no part of the module."""

    def __init__(self, in_features, num_classes, bias=False, *, device=None, dtype=None, **options):
        super().__init__()
        self._make(LF.linear_kl, in_features, num_classes, bias, device, dtype, options)

    def forward(self, input, teacher_input, teacher_weight, teacher_bias=None, row_weight=None, grad_scale=None, denominator=None):
        return LF.linear_kl(input, self.weight, teacher_input, teacher_weight, linear_bias=self.bias, teacher_bias=teacher_bias,
                            row_weight=row_weight, grad_scale=grad_scale, denominator=denominator, **self._all())


class MdLrpeCosine(torch.nn.Module):
    """Linearised relative positional encoding of [b, heads, n, head_dim], with a learned theta [heads, features per axis].
    A position has `axes` coordinates; activation is functional.md_lrpe_cosine's.

    Feature j of an axis starts at base^(-j / features) radians per position. theta is float32, also in a model that is cast to
    a type of 16 bits: an angle is theta times a position. With dtype it has that type."""

    def __init__(self, heads, head_dim, axes=1, activation=None, base=10000.0, device=None, dtype=None):
        super().__init__()
        features = -(-head_dim // axes)
        theta = base ** (-torch.arange(features, dtype=torch.float64) / features)
        self.theta = torch.nn.Parameter(theta.repeat(heads, 1).to(device=device, dtype=dtype or torch.float32))
        self.activation = activation

    def _apply(self, fn, recurse=True):
        def keep_float32(t):
            out = fn(t)
            return t.to(out.device) if t.dtype == torch.float32 and out.dtype != t.dtype else out
        return super()._apply(keep_float32, recurse)

    def forward(self, x, shape, prefix=0, offset=()):
        return LF.md_lrpe_cosine(x, self.theta, shape, prefix, self.activation, offset)

    def extra_repr(self):
        return f"heads={self.theta.shape[0]}, activation={self.activation!r}"
