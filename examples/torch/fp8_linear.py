#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A norm and a linear layer in 8 bits with lk_torch: forward, and both gradients, as products of 8 bits. Checked against bf16.

    PYTHONPATH=packages/torch python3 examples/torch/fp8_linear.py [--device cpu|cuda]

The norm writes its result in E4M3 and, in the same reading of x, the transposed copy. A Hopper GPU multiplies 8 bits only where
both matrices have the summed dimension contiguous, so the three products want:

    out     [tokens, out]  =  y [tokens, hidden]       times  weight [out, hidden]
    dy      [tokens, hidden]  =  dout [tokens, out]    times  weight.T [hidden, out]
    dweight [out, hidden]  =  dout.T [out, tokens]     times  y.T [hidden, tokens]      the transposed copy

Scaling is delayed, as people train: y's scale comes from the largest |y| of the step before. A weight and a gradient are quantised
by plain PyTorch here, with the scale of the moment. On a GPU the products are torch._scaled_mm; elsewhere the same numbers of 8
bits are multiplied in float32.
"""
import argparse
import sys

import torch
from lk_torch import functional as LF

E4M3, MOST = torch.float8_e4m3fn, 448.0


def quantise(a):
    """Numbers of 8 bits and one scale."""
    scale = (a.abs().amax().float() / MOST).clamp(min=1e-12)
    return (a.float() / scale).to(E4M3), scale


def product(a, scale_a, b, scale_b):
    """a @ b.T in bf16. Both have the summed dimension contiguous."""
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)
    return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(torch.bfloat16)


class Linear8(torch.autograd.Function):
    """y, its scale and its transposed copy come from the norm. The gradient of y is bf16: the norm's backward takes it."""

    @staticmethod
    def forward(ctx, y, scale, turned, weight):
        w, scale_w = quantise(weight)
        ctx.save_for_backward(turned, scale, weight)
        return product(y, scale, w, scale_w)

    @staticmethod
    def backward(ctx, dout):
        turned, scale, weight = ctx.saved_tensors
        d, scale_d = quantise(dout)
        wt, scale_w = quantise(weight.t().contiguous())
        dy = product(d, scale_d, wt, scale_w)
        dweight = product(d.t().contiguous(), scale_d, turned, scale)
        return dy, None, None, dweight


def step(x, residual, gain, weight, scale):
    """(out, the sum x + residual, the largest |y|)"""
    y, _, amax, turned, _, total = LF.add_rms_norm(x, residual, x.shape[-1], gain, 1e-6, out_dtype=E4M3, scaling="tensor",
                                                   scale=scale, amax=True, transposed=True)
    return Linear8.apply(y, scale, turned, weight), total, amax


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    large = device != "cpu"
    tokens, hidden, out = (4096, 2048, 2048) if large else (128, 192, 64)
    torch.manual_seed(0)
    make = lambda *shape, sigma=1.0: (torch.randn(*shape) * sigma).to(device, torch.bfloat16).requires_grad_()
    x, residual, gain, weight = make(tokens, hidden), make(tokens, hidden), make(hidden), make(out, hidden, sigma=hidden**-0.5)
    up = torch.randn(tokens, out).to(device, torch.bfloat16)
    leaves = [x, residual, gain, weight]
    scale, failed = torch.tensor(0.05, device=device), 0  # a guess; the first step clips |y| above 22
    for i in range(3):
        result, total, amax = step(x, residual, gain, weight, scale)
        found = [result, *torch.autograd.grad([result, total], leaves, [up, torch.ones_like(total)])]
        y, total = LF.add_rms_norm(x, residual, hidden, gain, 1e-6)
        plain = y @ weight.t()
        right = [plain, *torch.autograd.grad([plain, total], leaves, [up, torch.ones_like(total)])]
        errors = [float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm()) for a, b in zip(found, right)]
        failed += not max(errors) < 0.06
        names = ("out", "dx", "dresidual", "dgain", "dweight")
        print(f"step {i}: scale {float(scale):.4f}, largest |y| {float(amax):.2f}; beside bf16 off by: " +
              ", ".join(f"{name} {part:.3f}" for name, part in zip(names, errors)))
        scale = amax / MOST
    print("as expected" if not failed else "FAIL: further off than 8 bits explain")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
