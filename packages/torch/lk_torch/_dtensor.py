# SPDX-License-Identifier: MIT
"""DTensors that are sharded over rows: each rank's rows are a call of their own. What is sharded over the columns of a row is
gathered before, except by glu; so are the tokens of rope. functional.py imports this where it is given a DTensor."""
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def _sharded(x, columns):
    """x, with placements that leave these dimensions whole."""
    whole = lambda p: type(p) is not Shard or p.dim % x.dim() in columns
    kept = [Replicate() if whole(p) else Shard(p.dim % x.dim()) for p in x.placements]
    return x if list(x.placements) == kept else x.redistribute(placements=kept)


def _beside(name, t, mesh, placements):
    if not isinstance(t, DTensor):  # a plain tensor is that of all ranks
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if t.device_mesh != mesh:
        raise ValueError(f"lk: {name} is on another mesh than input")
    return t if list(t.placements) == list(placements) else t.redistribute(placements=placements)


def _shared(name, t, x):
    """Of a tensor that all rows use: this rank's copy, whose gradient is summed over the ranks that have other rows."""
    if t is None:
        return None
    sums = [Partial() if p.is_shard() else Replicate() for p in x.placements]
    return _beside(name, t, x.device_mesh, [Replicate()] * len(sums)).to_local(grad_placements=sums)


def _constant(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def _whole(local, mesh, placements, shape):
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def norm(call, input, residual, dims, groups, weight, bias):
    """call(input, residual, weight, bias) of this rank's rows."""
    first = input.dim() - dims - (groups != 1)
    x = _sharded(input, range(first, input.dim()))
    r = None if residual is None else _beside("residual", residual, x.device_mesh, x.placements).to_local()
    out = call(x.to_local(), r, _shared("weight", weight, x), _shared("bias", bias, x))
    whole = [_whole(t, x.device_mesh, x.placements, x.shape) for t in (out if residual is not None else (out,))]
    return whole[0] if residual is None else tuple(whole)


def glu(call, gate, up, row_weight):
    """call(gate, up, row_weight) of this rank's rows, and with up of its columns: of these each rank has a part of row_weight's
    gradient."""
    last = gate.dim() - 1
    x = _sharded(gate, (last,) if up is None else ())
    u = None if up is None else _beside("up", up, x.device_mesh, x.placements).to_local()
    columns = [p.is_shard(last) for p in x.placements]
    if row_weight is not None:
        rows = [Replicate() if of_columns else p for p, of_columns in zip(x.placements, columns)]
        sums = [Partial() if of_columns else p for p, of_columns in zip(rows, columns)]
        row_weight = _beside("row_weight", row_weight, x.device_mesh, rows).to_local(grad_placements=sums)
    shape = x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2)
    return _whole(call(x.to_local(), u, row_weight), x.device_mesh, x.placements, shape)


def rope(call, q, k, heads_first, position, cos, sin, weights, constants):
    """call(q, k, position, cos, sin, *weights, *constants) of this rank's batches and heads. Each has the positions of all tokens."""
    x = _sharded(q, (q.dim() - (2 if heads_first else 3), q.dim() - 1))
    y = None if k is None else _beside("k", k, x.device_mesh, x.placements)

    def of_batches(name, t, dim):  # the dimension of batches, if it has one
        if t is None:
            return None
        apart = q.dim() == 4 and dim >= 0 and t.shape[dim] > 1
        placed = [Shard(dim) if apart and p.is_shard(0) else Replicate() for p in x.placements]
        return _beside(name, t, x.device_mesh, placed).to_local()
    angles = [None if position is None else of_batches("position", position, position.dim() - 2),
              *(None if t is None else of_batches(name, t, t.dim() - 3) for name, t in (("cos", cos), ("sin", sin)))]
    out = call(x.to_local(), None if y is None else y.to_local(), *angles,
               *(_shared(name, t, x) for name, t in zip(("q_weight", "k_weight"), weights)), *map(_constant, constants))
    whole = [_whole(t, x.device_mesh, x.placements, v.shape) for t, v in zip((out,) if k is None else out, (x, y))]
    return whole[0] if k is None else tuple(whole)


def logsumexp(call, input, dims, keepdim):
    x = _sharded(input, dims)
    shape = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
    gone = lambda d: 0 if keepdim else sum(i < d for i in dims)
    placements = [Shard(p.dim - gone(p.dim)) if p.is_shard() else p for p in x.placements]
    return _whole(call(x.to_local()), x.device_mesh, placements, shape)


def loss(call, input, target, weight, ignore_index, reduction, denominator, row_weight, reduced):
    """call(input, target, weight, denominator, row_weight) of this rank's rows; `reduced`: which of its results are."""
    dim = 1 if input.dim() > 1 else 0
    probable = target.is_floating_point()
    if reduction == "mean" and denominator is None:
        if weight is not None:
            input = _sharded(input, range(input.dim()))  # a mean of its own for the class terms, and another for z_loss
        elif probable:
            denominator = input.numel() // input.shape[dim]
        else:
            denominator = (target != ignore_index).sum()
    x = _sharded(input, (dim,))
    per_row = [Shard(p.dim - (p.dim > dim)) if p.is_shard() else p for p in x.placements]
    t = _beside("target", target, x.device_mesh, x.placements if probable else per_row).to_local()
    factors = None if row_weight is None else _beside("row_weight", row_weight, x.device_mesh, per_row).to_local()
    out = call(x.to_local(), t, _constant(weight), _constant(denominator), factors)
    rows = [n for i, n in enumerate(x.shape) if i != dim]
    sums = [Partial() if p.is_shard() else p for p in x.placements]
    whole = [_whole(v, x.device_mesh, *((sums, ()) if reduction != "none" and i in reduced else (per_row, rows)))
             for i, v in enumerate(out if isinstance(out, tuple) else (out,))]
    return tuple(whole) if isinstance(out, tuple) else whole[0]
