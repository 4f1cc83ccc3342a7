# SPDX-License-Identifier: MIT
"""lk under a model that exists: patch(model), unpatch(model). It knows transformers' models by their structure and imports
nothing of them.

A patched module has a class of the same name, a subclass of its own, whose forward calls lk. So parameters, hooks, isinstance,
state_dicts, copies and pickles stay as they were."""
import functools
import inspect
import itertools
import math
import sys
import types
import warnings

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from . import functional as LF

_DEVICE = "cuda" if _C.BACKEND == "cuda" else "cpu"


def _here(x):
    return x.dtype in LF._TYPES and x.device.type == _DEVICE


class _Stand:
    """Stands for a tensor, which tensor(why) computes. Functions whose names are in `passing` are methods of its own; all others
    take the tensor."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(name), name)

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in cls.passing and args and isinstance(args[0], cls) and not kwargs:
            return getattr(args[0], name)(*args[1:])
        real = lambda v: v.tensor(name) if isinstance(v, _Stand) else [*map(real, v)] if isinstance(v, (list, tuple)) else v
        return function(*map(real, args), **{k: real(v) for k, v in (kwargs or {}).items()})


def _real(value):
    return value.tensor() if isinstance(value, _Stand) else value


def _by_tensor(name):
    return lambda self, *args: getattr(self.tensor(name), name)(*args)


for _name in ("add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow neg abs eq ne lt le gt ge and or invert matmul "
              "getitem setitem len iter bool").split():
    setattr(_Stand, f"__{_name}__", _by_tensor(f"__{_name}__"))
_Stand.__hash__ = object.__hash__


# ---- Norms ------------------------------------------------------------------------------------------------------------------


class _Norm:
    """_lk is (eps's name, weight_offset, mixed, plain, gate_first) while patched. mixed: with a float32 weight a 16-bit result stays
    one of 16 bits. plain: it takes x alone. gate_first: it takes a gate too, and where that stands; None: it takes none. In a
    forward of its _Attention _lk_call is True, and what it returns stands for its result."""

    def forward(self, x, *args, **kwargs):
        lk = self._lk
        gate = args[0] if len(args) == 1 and not kwargs else kwargs.get("gate") if len(kwargs) == 1 and not args else None
        if (lk is None or not _here(x) or x.dtype != self.weight.dtype and not (lk[2] and self.weight.dtype == torch.float32)
                or not isinstance(getattr(self, lk[0]), (float, int, type(None)))):
            return super().forward(x, *args, **kwargs)
        if not args and not kwargs and lk[3]:
            return self._lk_norm(x) if self._lk_call is None else _Normed(self, x)
        if lk[4] is not None and isinstance(gate, Tensor) and gate.shape == x.shape and gate.dtype == x.dtype and _here(gate):
            return self._lk_norm(x, gate=gate, gate_first=lk[4])
        return super().forward(x, *args, **kwargs)

    def _lk_norm(self, x, **more):
        eps, offset = self._lk_numbers()
        return LF.rms_norm(x, self.weight.shape, self.weight, eps, weight_offset=offset, **more)

    def _lk_numbers(self):
        """(eps, weight_offset). eps may change after patch."""
        return getattr(self, self._lk[0]), self._lk[1]


class _Normed(_Stand):
    """Stands for norm(x), between a norm of heads and the rotation after it, which computes both. What is no transposition takes
    it for what it stands for. Each alias gives a view of its base then."""

    passing = ("transpose",)

    def __init__(self, norm, x, base=None, dims=()):
        self.norm, self.x, self.base, self.dims, self.made = norm, x, base, dims, None

    @property
    def known(self):
        return self.made is not None or self.base is not None and self.base.known

    def tensor(self, why=""):
        if self.made is None:
            self.made = self.norm._lk_norm(self.x) if self.base is None else self.base.tensor().transpose(*self.dims)
        return self.made

    def transpose(self, a, b):
        last = self.x.dim() - 1
        if self.known or a in (-1, last) or b in (-1, last):
            return self.tensor().transpose(a, b)
        return _Normed(self.norm, self.x.transpose(a, b), self, (a, b))


def _norm_of(module, _):
    """(what _Norm needs, None), (None, why not), or (None, None) where it looks like no norm."""
    weight = module._parameters.get("weight")
    eps = {name: v for name, v in vars(module).items() if "eps" in name and (v is None or isinstance(v, float))}
    if not eps or weight is None or module._modules:
        return None, None
    if sum(p is not None for p in module._parameters.values()) > 1 or weight.dim() != 1:
        return None, "it has more than a weight of one dimension"
    if len(eps) > 1:
        return None, f"which of {', '.join(eps)} is its eps?"
    (name, eps), n = *eps.items(), weight.shape[0]
    # Its class computes a copy with random weights in float32 on the CPU, whatever the model's type and device, meta included.
    generator = torch.Generator().manual_seed(1)
    probe = object.__new__(type(module))
    probe.__dict__.update(vars(module), _lk=None)
    w = torch.rand(n, generator=generator, device="cpu") + 0.5
    probe._parameters = {**module._parameters, "weight": torch.nn.Parameter(w)}
    x = torch.randn(3, 2, n, generator=generator, device="cpu")
    number = torch.finfo(torch.float32).eps if eps is None else eps
    x[1] *= number**0.5  # here eps is half of the result
    gate = torch.randn(3, 2, n, generator=generator, device="cpu")
    silu = torch.nn.functional.silu(gate.double())
    unit = lambda s: s * (s.square().mean(-1, keepdim=True) + number).rsqrt()
    forward, error = functools.partial(type(module).forward, probe), None

    def tried(*more):
        """(weight_offset, gate_first, mixed) of what it computes of x and a gate; None where it is no such norm."""
        y, low = forward(x, *more), [t.bfloat16() for t in (x, *more)]
        mixed = forward(*low).dtype == torch.bfloat16
        probe._parameters["weight"] = torch.nn.Parameter(w.bfloat16())
        narrow = forward(*low).dtype == torch.bfloat16
        probe._parameters["weight"] = torch.nn.Parameter(w)
        units = {False: unit(x.double()) * silu, True: unit(x.double() * silu)} if more else {None: unit(x.double())}
        for offset, (first, right) in itertools.product((0.0, 1.0), units.items()):
            # float32: the sum of squares, its square root and three products, each some units of 2^-24; with a gate silu's too
            right, units_off = right * (offset + w), 128 if more else 32
            if narrow and y.shape == x.shape and ((y - right).abs() <= units_off * 2.0**-24 * right.abs()).all():
                return offset, first, mixed
        return None
    found = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for more in ((), (gate,)):
            try:
                found.append(tried(*more))
            except Exception as raised:
                found.append(None)
                error = error or raised
    alone, gated = found
    if alone is None and gated is None:
        return None, "on a small input it " + (f"raises {type(error).__name__}" if error is not None else "is no RMS norm")
    if alone is not None and gated is not None and (alone[0], alone[2]) != (gated[0], gated[2]):
        gated = None
    offset, _, mixed = alone or gated
    return (name, offset, mixed, alone is not None, None if gated is None else gated[1]), None


# ---- Heads ------------------------------------------------------------------------------------------------------------------


class _Head:
    """The Linear of a head. In a forward of its model with labels, _lk_call is there, and what it returns stands for its logits.
    Then it is called once more, from the loss, to compute that. So hooks (FSDP's, which gather its weight) see a call."""

    def __call__(self, *args, **kwargs):
        if self._lk_call is None or len(args) != 1 or kwargs:
            return super().__call__(*args, **kwargs)
        rows, x = self.weight.shape, args[0]  # of another shape where its parts lie elsewhere, as under ZeRO-3
        classes = rows[0] if len(rows) == 2 and rows[0] else self.out_features
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Logits(self, x, torch.Size((*x.shape[:-1], classes)), dtype)

    def forward(self, x, *args, _lk_loss=None, **kwargs):
        return super().forward(x, *args, **kwargs) if _lk_loss is None else _lk_loss(self, x)

    def _lk_logits(self, x):
        return super().__call__(x)


class _Call:
    """A forward with labels: whether lk computed its loss, and what made logits all the same."""

    def __init__(self):
        self.done, self.why = False, None


class _Logits(_Stand):
    """Stands for factor * z, or with cap for cap * tanh(factor / cap * z), between a model's head and its loss. z is head(x), or
    its first classes. What is not a product with a number, a tanh, a change of type, a view with other rows, or such a slice,
    takes it for what it stands for. Then that is computed, as the model would, step by step from what each was made from, its
    base. It is known from there on, since it may be written to, and so is each alias, whose step gives a view of its base."""

    passing = "mul", "div", "tanh", "reshape"

    def __init__(self, head, x, shape, dtype, classes=None, factor=1.0, cap=None, base=None, step=None, alias=False):
        self.head, self.x, self.shape, self.dtype = head, x, shape, dtype
        self.classes, self.factor, self.cap = classes, factor, cap
        self.base, self.step, self.alias, self.made = base, step, alias, None

    def then(self, step, alias=False, **change):
        if self.known is not None:
            return step(self.known)
        of = dict(shape=self.shape, dtype=self.dtype, classes=self.classes, factor=self.factor, cap=self.cap)
        return _Logits(self.head, self.x, base=self, step=step, alias=alias, **{**of, **change})

    @property
    def known(self):
        if self.made is None and self.alias and self.base.known is not None:
            self.made = self.step(self.base.known)
        return self.made

    def of(self, z):
        return z if self.base is None else self.step(self.base.of(z))

    def tensor(self, why=""):
        if self.known is None:
            call = self.head._lk_call or _Call()  # none: after the forward
            call.why = call.why or f"its forward takes them as a tensor{why and ', for '}{why}"
            self.made = self.step(self.base.tensor()) if self.alias else self.of(self.head._lk_logits(self.x))
        return self.made

    # What passes

    def mul(self, other):
        if not isinstance(other, (int, float)):
            return self.tensor("a product with no number") * other
        cap = None if self.cap is None else self.cap * other  # of a tanh, the product is with cap, and so with factor
        return self.then(lambda z: z * other, factor=self.factor * other, cap=cap)

    def div(self, other, **kwargs):
        if not isinstance(other, (int, float)) or not other or kwargs:
            return self.tensor("a division by no number").div(other, **kwargs)
        cap = None if self.cap is None else self.cap / other
        return self.then(lambda z: z / other, factor=self.factor / other, cap=cap)

    def tanh(self):
        return self.tensor("a tanh of a tanh").tanh() if self.cap is not None else self.then(torch.tanh, cap=1.0)

    def to(self, *args, **kwargs):
        dtype, device = self.dtype, self.device
        for v in (*args, *kwargs.values()):
            if isinstance(v, torch.dtype):
                dtype = v
            elif isinstance(v, (Tensor, _Logits)):
                dtype, device = v.dtype, v.device
            elif not isinstance(v, bool):
                device = torch.device(v)
        if not dtype.is_floating_point or device != self.device or not {"dtype", "device"}.issuperset(kwargs):
            return self.tensor("to()").to(*args, **kwargs)
        return self.then(lambda z: z.to(dtype), dtype == self.dtype, dtype=dtype)

    def float(self):
        return self.to(torch.float32)

    def type_as(self, other):
        return self.to(other.dtype)

    def contiguous(self):
        return self.then(lambda z: z.contiguous(), True)

    def reshape(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if (not shape or shape[-1] != self.shape[-1] or shape.count(-1) > 1
                or not all([isinstance(n, int) and n >= -1 for n in shape])):
            return self.tensor("reshape()").reshape(shape)
        count, rest = self.shape.numel(), torch.Size([n for n in shape if n != -1]).numel()
        if -1 in shape and rest:
            shape = tuple([count // rest if n == -1 else n for n in shape])
        if torch.Size(shape).numel() != count:
            return self.tensor("reshape()").reshape(shape)
        return self.then(lambda z: z.reshape(shape), True, shape=torch.Size(shape))

    def view(self, *shape):
        return self.tensor("view()").view(*shape) if isinstance(shape[0], torch.dtype) else self.reshape(*shape)

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else ()
        whole, last = slice(None), keys[-1] if keys else None
        if (isinstance(last, slice) and last.start in (None, 0) and last.step in (None, 1) and isinstance(last.stop, int)
                and last.stop > 0 and (keys[:-1] == (Ellipsis,) or keys[:-1] == (whole,) * (len(self.shape) - 1))):
            classes = min(last.stop, self.shape[-1])
            return self.then(lambda z: z[key], True, classes=classes, shape=torch.Size((*self.shape[:-1], classes)))
        return self.tensor("an index")[key]

    device = property(lambda self: self.x.device)
    ndim = property(lambda self: len(self.shape))

    def dim(self):
        return len(self.shape)

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def __len__(self):
        return self.shape[0]

    __mul__ = __rmul__ = mul
    __truediv__ = div


def _wanted(value):
    return not isinstance(value, _Logits) or value.known is not None


def _known(value):
    return value.known if isinstance(value, _Logits) else value


class _Model:
    """_lk is (the head's name, where labels are among the arguments, whether eval() keeps logits, workspace_mib) while patched.
    _lk_why says why the last call whose loss was to come without logits had them all."""

    def forward(self, *args, **kwargs):
        lk = self._lk
        if lk is None:
            return super().forward(*args, **kwargs)
        name, at, eval_logits, _ = lk
        labels = kwargs["labels"] if "labels" in kwargs else args[at] if len(args) > at else None
        if labels is None or eval_logits and not self.training:
            return super().forward(*args, **kwargs)
        head = self._modules[name]
        why = _not_head(name, head, _fsdp(head))
        if why is None and getattr(self.loss_function, "__name__", "") != "ForCausalLMLoss":
            why = "its loss_function was set"
        if why is None and not isinstance(head, _Head):
            why = f"its {name} is another one than at patch"
        if why is not None:
            _say(self, why)
            return super().forward(*args, **kwargs)
        call = self._lk_call = head._lk_call = _Call()
        try:
            out = super().forward(*args, **kwargs)
        finally:
            self._lk_call = head._lk_call = None
        _say(self, call.why or (None if call.done else "its forward computes a loss of its own"))
        if isinstance(out, tuple):
            return tuple(map(_known, out))  # None in the logits' place, so that the others keep theirs
        return type(out)(**{k: _known(v) for k, v in out.items() if _wanted(v)})

    @property
    def loss_function(self):
        own = self._lk_base.loss_function.fget(self)  # not super(), which torch.compile does not trace here
        return functools.partial(_loss, own, self._lk[3], self._lk_call) if self._lk_call is not None else own

    @loss_function.setter
    def loss_function(self, value):
        self._lk_base.loss_function.fset(self, value)


def _say(model, why):
    """A warning where why is new: a saving of memory does not go without a word."""
    if why != model._lk_why:
        model._lk_why = why
        if why is not None:
            _warn(f"lk_torch.patch: {type(model).__name__} makes all logits for its loss: {why}")


@torch.compiler.assume_constant_result  # said as it is compiled
def _warn(words):
    warnings.warn(words, stacklevel=2)


def _loss(own, workspace_mib, call, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
          **kwargs):
    """transformers' ForCausalLMLoss, of which own is the original."""
    more = dict(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels, **kwargs)
    if not isinstance(logits, _Logits) or logits.known is not None:
        return own(_known(logits), labels, vocab_size, **more)
    factor, cap = float(logits.factor), logits.cap

    def compute(head, x):
        weight, bias, why = head.weight, head.bias, None
        if not _here(x) or weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            why = f"{x.dtype} on {x.device.type} with a weight of {weight.dtype}"
        elif LF._sharded(x) or is_traceable_wrapper_subclass(weight):
            why = f"a {type(x).__name__} with a weight that is a {type(weight).__name__}"
        elif weight.dim() != 2 or (logits.classes or weight.shape[0]) != vocab_size:
            why = f"logits of {weight.shape[0]} classes for a loss of {vocab_size}"
        elif not all(2.0**-100 <= v <= 2.0**100 for v in ((factor,) if cap is None else (factor, cap, factor / cap))):
            why = f"a factor of {factor}" + (f" and a softcap of {cap}" if cap is not None else "")
        if why is not None:
            call.why = call.why or why
            return own(logits.of(torch.nn.functional.linear(x, weight, bias)), labels, vocab_size, **more)
        call.done = True
        if logits.classes is not None:
            weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
        target = shift_labels
        if target is None:
            target = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = target.to(x.device).reshape(-1)
        items = num_items_in_batch
        if isinstance(items, Tensor):
            items = items.to(x.device, torch.float32)
        return LF.linear_cross_entropy(x.reshape(-1, x.shape[-1]), weight, target, linear_bias=bias, ignore_index=ignore_index,
                                       softcap=cap, logit_scale=factor, denominator=items,
                                       workspace_mib=workspace_mib)

    return logits.head(logits.x, _lk_loss=compute)


def _fsdp(module):
    """Whether FSDP2 gathers its parameters, which are DTensors until it is called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _not_head(name, head, gathered):
    """Why a head is left, or None. gathered: a DTensor of a weight may be whole in the call."""
    if getattr(type(head), "forward", None) not in (torch.nn.Linear.forward, _Head.forward):
        return f"its {name} is a {type(head).__module__}.{type(head).__qualname__}, whose forward is not that of torch.nn.Linear"
    if is_traceable_wrapper_subclass(head.weight) and not (gathered and LF._sharded(head.weight)):
        return f"the weight of its {name} is a {type(head.weight).__name__}"
    return f"the forward of its {name} was replaced, by accelerate or tensor parallelism say" if "forward" in vars(head) else None


def _head_of(module, gathered):
    """(what _Model needs, None), (None, why not), or (None, None) where it has no head."""
    get = getattr(type(module), "get_output_embeddings", None)
    if get is None or "labels" not in (names := list(inspect.signature(type(module).forward).parameters)):
        return None, None
    try:
        head = module.get_output_embeddings()
    except Exception:
        return None, None
    causal = isinstance(getattr(type(module), "loss_function", None), property)
    name = next((name for name, child in module._modules.items() if child is head), None)
    if head is None or name is None and not causal:
        return None, None
    if not causal:
        return None, "it has no loss_function: transformers before 4.46, or a model with a loss of its own"
    if (which := getattr(module.loss_function, "__name__", "?")) != "ForCausalLMLoss":
        return None, f"its loss is {which}"
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and not {"loss_function", "super"} & set(code.co_names):
        return None, "its forward computes a loss of its own"
    if name is None:
        return None, f"its head is a {type(head).__qualname__} within another module"
    why = _not_head(name, head, gathered)
    return (None, why) if why else ((name, names.index("labels") - 1), None)


# ---- MLPs -------------------------------------------------------------------------------------------------------------------


def _hooked(module, name):
    """Whether a hook is to see a call of this child. name may be None."""
    child = module._modules.get(name)
    return child is not None and bool(child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or
                                      child._backward_pre_hooks)


def _kept(module, names):
    """What glu's options were found with, ((name, value), ...): the activation, and numbers. names: of children."""
    return (*((name, module._modules[name]) for name in names), *(
        (name, v) for name, v in vars(module).items() if callable(v) and name != "_compiled_call_impl" or
        type(v) in (int, float) and any(word in name for word in _WORDS)))


def _changed(module, kept):
    """Whether one of what was kept was set to something else since."""
    for name, value in kept:
        now = module.__dict__.get(name, module._modules.get(name))
        if now is not value and (type(now) is not type(value) or now != value and not _alike(now, value)):
            return True
    return False


def _alike(a, b):
    """Whether two objects of a class compute alike: modules without children whose own attributes are equal, as those of
    DataParallel's replicas are. torch.compile of PyTorch 2.11 cannot read them: then no."""
    if torch.compiler.is_compiling():
        return False
    own = [{name: v for name, v in vars(m).items() if name not in _MODULE} for m in (a, b) if isinstance(m, torch.nn.Module)]
    return (len(own) == 2 and not a._modules and not b._modules and not any(isinstance(v, Tensor) for v in own[0].values())
            and own[0] == own[1])


_WORDS = "alpha", "limit"  # in the names of glu's numbers
_MODULE = {*vars(torch.nn.Module()), "_is_replica", "_former_parameters"}


class _Mlp:
    """_lk is (the names of the Linears before the product, of the one after it, of the activation; what is kept; glu's options)
    while patched."""

    def forward(self, *args, **kwargs):
        lk = self._lk
        if lk is None or len(args) != 1 or kwargs or not _here(args[0]) or _hooked(self, lk[2]) or _changed(self, lk[3]):
            return super().forward(*args, **kwargs)
        parts = [self._modules[name](args[0]) for name in lk[0]]
        if not _here(parts[0]) or parts[0].dtype != parts[-1].dtype:
            return super().forward(*args, **kwargs)
        return self._modules[lk[1]](LF.glu(*parts, **lk[4]))


class _Experts:
    """Experts whose weights are one tensor. Transformers' grouped products call a method of theirs for the gated product. _lk is
    (the activation's name, what is kept, glu's options) while patched."""

    def _apply_gate(self, x):
        lk = self._lk
        if lk is None or not _here(x) or _hooked(self, lk[0]) or _changed(self, lk[1]):
            return super()._apply_gate(x)
        return LF.glu(x, **lk[2])


_ACTS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu": torch.relu, "sigmoid": torch.sigmoid,
         "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh")}


def _glu_of(module, parts, call):
    """(glu's options with which it is call(*parts), None), or (None, why not). Tried with random parts: a gate and up, or both in
    one."""
    values = {word: [float(v) for name, v in vars(module).items() if word in name and type(v) in (int, float) and 0 < v < math.inf]
              for word in _WORDS}
    x = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1), device="cpu")
    x *= torch.tensor([2.0, 8.0, 64.0, 2048.0, 2 * max([1.0, *values["limit"]])])[:, None, None]  # near 0, and beyond any clamp
    halves = x[..., :6], x[..., 6:]
    args = halves if parts == 2 else (x,)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = call(*args)
            if call(*(t.bfloat16() for t in args)).dtype != torch.bfloat16:
                return None, "of bfloat16 it makes another type"
    except Exception as error:
        return None, f"on a small input it raises {type(error).__name__}"
    for act, interleaved, limit, alpha, offset in itertools.product(
            _ACTS, (False, True)[:3 - parts], (*values["limit"], None), (*values["alpha"], 1.0), (0.0, 1.0)):
        gate, up = (x[..., ::2].double(), x[..., 1::2].double()) if interleaved else (t.double() for t in halves)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        right = _ACTS[act](alpha * gate) / alpha * (up + offset)
        # float32: an exponential, a tanh or an erf, some sums and products, each some units of 2^-24
        if (y.shape == right.shape and (alpha == 1.0 or act == "silu") and
                ((y - right).abs() <= 32 * 2.0**-24 * ((1 + gate.abs()) * (up.abs() + offset))).all()):
            options = dict(alpha=(alpha, 1.0), limit=(limit, None), up_offset=(offset, 0.0), interleaved=(interleaved, False))
            return dict(activation=act, **{name: v for name, (v, default) in options.items() if v != default}), None
    return None, "on a small input it is no gated product of glu's"


def _probe(module, children):
    """A copy for its class to compute with, which has these children instead of its own."""
    probe = object.__new__(type(module))
    probe.__dict__.update(vars(module), _lk=None, training=True, _modules={**module._modules, **children})
    return probe


def _sizes(child):
    """(in_features, out_features) of what is called as a Linear, None of another one."""
    sizes = getattr(child, "in_features", None), getattr(child, "out_features", None)
    return sizes if all(isinstance(n, int) for n in sizes) else None


def _tensors_of(module, *names):
    """Whether it, or one of these children, has a parameter or a buffer, which may change."""
    return any(t is not None for t in (*module._parameters.values(), *module._buffers.values())) or any(
        [*child.parameters(), *child.buffers()] for name in names if (child := module._modules[name]) is not None)


def _mlp_of(module, _):
    """(what _Mlp needs, None), (None, why not), or (None, None) where it looks like no MLP with a gate."""
    sizes = {name: size for name, child in module._modules.items() if (size := _sizes(child))}
    others, why = [name for name, child in module._modules.items() if child is not None and name not in sizes], None
    if len(sizes) not in (2, 3) or not others and not any(map(callable, vars(module).values())):
        return None, None
    for *before, after in itertools.permutations(sizes):
        width, n = sizes[before[0]][0], sizes[after][0]
        if any(sizes[name] != (width, n * (3 - len(before))) for name in before):
            continue
        if len(others) > 1 or any(isinstance(module._modules[name], torch.nn.modules.dropout._DropoutNd) for name in others):
            why = f"it has {' and '.join(others)} beside its Linears"
        elif _tensors_of(module, *others):
            why = "it has tensors beside its Linears'"
        else:
            options, said = _glu_of(module, len(before), functools.partial(_mlp, module, before, after))
            if options is not None:
                return (tuple(before), after, others[0] if others else None, _kept(module, others), options), None
            why = why or said
    return None, why if any(a != b for a, b in sizes.values()) else None  # of Linears of one size, as in attention: no word


def _mlp(module, before, after, *parts):
    """What its class makes of these results of its Linears. The last one changes the sign, to be seen."""
    def linear(part):
        def of(x):
            if x is not parts[0]:
                raise ValueError("its input was changed")
            return part
        return of
    probe = _probe(module, {**{name: linear(part) for name, part in zip(before, parts)}, after: torch.neg})
    return -type(module).forward(probe, parts[0])


def _experts_of(module, _):
    """(what _Experts needs, None), (None, why not), or (None, None) where it has no such method."""
    if not hasattr(type(module), "_apply_gate") or not getattr(module, "has_gate", True):
        return None, None
    names = [name for name, child in module._modules.items() if child is not None and not _sizes(child)]
    own = inspect.unwrap(type(module).forward)
    if (getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
            and "_apply_gate" not in _names(own)):
        return None, "experts_implementation is eager, a loop of its own"
    if any([*module._modules[name].parameters()] for name in names):
        return None, "its activation has parameters"
    options, why = _glu_of(module, 1, lambda x: type(module)._apply_gate(_probe(module, {}), x))
    return (None, why) if why else ((next(iter(names), None), _kept(module, names), options), None)


# ---- Rotary embeddings ------------------------------------------------------------------------------------------------------


class _Attention:
    """A forward that calls a function of its module's globals, as apply_rotary_pos_emb(q, k, cos, sin). The class has it once
    more, as _lk_forward, with lk's in that function's place; other models do not see it. _lk is (the names of the norms that go
    with the rotation, where position_embeddings is among the arguments, a line for the table) while patched."""

    def forward(self, *args, **kwargs):
        lk = self._lk
        if lk is None:
            return super().forward(*args, **kwargs)
        angles = kwargs.get("position_embeddings", args[lk[1]] if len(args) > lk[1] else None)
        norms = [self._modules[name] for name in lk[0] if angles is not None and not _hooked(self, name)]
        norms = [norm for norm in norms if isinstance(norm, _Norm)]
        for norm in norms:
            norm._lk_call = True
        try:
            return self._lk_forward(*args, **kwargs)
        finally:
            for norm in norms:
                norm._lk_call = None


def _turned(x, cos, sin, interleaved):
    """x with its pairs turned in float64; cos and sin have a number for each pair."""
    n = 2 * cos.shape[-1]
    a, b = (x[..., :n:2], x[..., 1:n:2]) if interleaved else (x[..., :n // 2], x[..., n // 2:n])
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), x[..., n:]], -1)


_TABLES = {  # how a function reads cos and sin of c, with a number for each pair, and how they are made so that it can be seen
    "half": lambda c: c, "first half": lambda c: torch.cat([c, 1 - c], -1), "halves": lambda c: torch.cat([c, c], -1),
    "pairs": lambda c: c.repeat_interleave(2, -1)}


@functools.cache
def _rope_of(function):
    """(lk's function in place of one that turns q and k, or q, by cos and sin; None), (None, why not), or (None, None)."""
    own = function.forward if isinstance(function, torch.nn.Module) else function
    if not isinstance(own, (types.FunctionType, types.MethodType)):
        return None, None
    names = list(inspect.signature(own).parameters)
    count = names.index("cos") if "cos" in names else 0
    if count not in (1, 2) or names[count:count + 2] != ["cos", "sin"]:
        return None, None
    generator = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(*shape, generator=generator, device="cpu")
    xs, cos, sin = (rand(2, 3, 5, 8), rand(2, 1, 5, 8))[:count], rand(2, 5, 4), rand(2, 5, 4)

    def made(table, at=None, pairs=4, dtype=torch.float32, of_tables=torch.float32):
        """What it makes of so many pairs. at: its unsqueeze_dim; None: as it is by default."""
        place = lambda t: t.transpose(1, 2) if at == 2 else t
        tables = [_TABLES[table](t[..., :pairs]).to(of_tables) for t in (cos, sin)]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            ys = function(*(place(x).to(dtype) for x in xs), *tables, **({} if at is None else dict(unsqueeze_dim=at)))
        return [place(y) for y in ((ys,) if count == 1 else ys)]

    def right(table, interleaved, *args):
        try:
            ys = made(table, *args)
        except Exception:
            return False
        pairs = args[1] if len(args) > 1 else 4
        wide = [_turned(x.double(), *(t.double()[:, None, :, :pairs] for t in (cos, sin)), interleaved) for x in xs]
        return len(ys) == count and all(  # 2^-18: some roundings of float32
            y.shape == w.shape and (y - w).abs().max() <= 2.0**-18 for y, w in zip(ys, wide))

    def half(of_tables):
        """Whether it makes bfloat16 of bfloat16."""
        try:
            return all(y.dtype == torch.bfloat16 for y in made(table, None, 4, torch.bfloat16, of_tables))
        except Exception:
            return False

    how = next((how for how in itertools.product(_TABLES, (False, True)) if right(*how)), None)
    if how is None:
        return None, "on a small input it turns no pairs, halves or neighbours, by cos and sin"
    table, interleaved = how
    if not half(torch.bfloat16):
        return None, "of bfloat16 it makes another type"
    mixed, partial = half(torch.float32), right(*how, None, 2)
    heads_first = {at: at != 2 for at in (None, 1, 2) if right(*how, at)}

    def turn(q, k, cos, sin, args, kwargs):
        """None where it is not for lk."""
        at = kwargs.get("unsqueeze_dim")
        first = None if args or len(kwargs) > (at is not None) else heads_first.get(at)
        norms = [x.norm if isinstance(x, _Normed) and not x.known else None for x in (q, k)]
        q, k = (x.x if norm is not None else _real(x) for x, norm in zip((q, k), norms))
        rotary, tokens = cos.shape[-1] * (2 if table == "half" else 1), -2 if first else -3
        if (first is None or not _here(q) or LF._sharded(q) or q.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape
                or cos.dtype != sin.dtype or cos.dtype != q.dtype and not (mixed and cos.dtype == torch.float32)
                or cos.device != q.device or cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[tokens]
                or rotary != q.shape[-1] and not (partial and rotary < q.shape[-1])
                or torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)):
            return None
        if k is not None and (k.dtype != q.dtype or any(k.shape[i] != q.shape[i] for i in (0, tokens, -1))):
            return None
        weights = [None if norm is None else norm.weight for norm in norms]
        numbers = [norm._lk_numbers() for norm in norms if norm is not None]
        if numbers and (numbers[0] != numbers[-1] or numbers[0][0] is None or len({w.dtype for w in weights if w is not None}) > 1):
            return None
        if table == "first half":
            cos, sin = cos[..., :rotary // 2], sin[..., :rotary // 2]
        eps, offset = numbers[0] if numbers else (1e-6, 0.0)
        return LF.rope(q, k, cos=cos, sin=sin, rotary_dim=rotary, interleaved=interleaved, heads_first=first,
                       q_weight=weights[0], k_weight=weights[1], eps=eps, weight_offset=offset)

    if count == 1:
        def rope(x, cos, sin, *args, **kwargs):
            made = turn(x, None, cos, sin, args, kwargs)
            return function(_real(x), cos, sin, *args, **kwargs) if made is None else made
    else:
        def rope(q, k=None, cos=None, sin=None, *args, **kwargs):
            made = None if k is None else turn(q, k, cos, sin, args, kwargs)
            return function(_real(q), _real(k), cos, sin, *args, **kwargs) if made is None else made
    rope._lk = count, interleaved, table
    return rope, None


def _tables_of(module):
    """How cos and sin of a rotary embedding, which is called with x and position_ids, have each number twice: a part of "halves"
    and "pairs". None of what is none, or can't be tried. Its class computes a copy on the CPU."""
    forward = getattr(type(module), "forward", None)
    if (not isinstance(forward, types.FunctionType) or module._modules or "forward" in vars(module)
            or any(p is not None for p in module._parameters.values())):
        return None
    names = list(inspect.signature(forward).parameters)[1:]
    if names[1:2] != ["position_ids"]:
        return None
    generator = torch.Generator().manual_seed(1)
    own = lambda b: torch.rand(b.shape, generator=generator, device="cpu") if b.is_meta else b.detach().to("cpu", copy=True)
    kinds, twice = ((),) if names[2:] != ["layer_type"] else [(kind,) for kind in getattr(module, "layer_types", ())], []
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for kind in kinds:
                probe = _probe(module, {})
                probe._buffers = {name: None if b is None else own(b) for name, b in module._buffers.items()}
                cos, sin = forward(probe, torch.zeros(1, 3, 8, device="cpu"), torch.tensor([[1, 2, 5]], device="cpu"), *kind)
                for t in (cos, sin):
                    pairs = dict(halves=t.chunk(2, -1), pairs=(t[..., ::2], t[..., 1::2]))
                    twice.append({name for name, (a, b) in pairs.items() if a.shape == b.shape and (a - b).abs().max() <= 2.0**-18})
    except Exception:
        return None
    return set.intersection(*twice) if twice else None


def _tables_in(model):
    """{a module's place: {the name of a rotary embedding that is a child of its: what _tables_of says}}."""
    found = {}
    for path, module in model.named_modules():
        tables = {name: _tables_of(child) for name, child in module._modules.items() if child is not None}
        if known := {name: has for name, has in tables.items() if has is not None}:
            found[path] = known
    return found


def _differing(path, ropes, tables):
    """Why these functions, which read one of each two numbers, would compute something else in an attention at this place; or None.
    Its rotary embeddings are children of its own, or of the nearest module around it that has some. Where cos and sin come from
    elsewhere, nothing is known."""
    parts, both = path.split("."), {"halves": "the halves", "pairs": "neighbours"}
    near = next((found for i in range(len(parts), -1, -1) if (found := tables.get(".".join(parts[:i])))), {})
    return next((f"{name}: {both[rope._lk[2]]} of {rotary}'s cos and sin differ" for name, rope in ropes.items()
                 for rotary, has in near.items() if rope._lk[2] in both and rope._lk[2] not in has), None)


def _names(function):
    """What it reads by name: globals, and attributes too."""
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    for code in codes:
        codes.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
    return {name for code in codes for name in code.co_names}


def _with(function, scope):
    """The function with other globals, also within decorators, which hold what they call in their closures. Or None."""
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__ or ()
    if inner is not None:
        held = [cell.cell_contents is inner for cell in cells]
        made = _with(inner, scope) if any(held) else None
        if made is None:
            return None
        scope, cells = function.__globals__, tuple(types.CellType(made) if own else cell for own, cell in zip(held, cells))
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _ropes_of(base):
    """Of the functions that a forward of this class calls and that turn by cos and sin: ({name: lk's}, {name: why not})."""
    own = inspect.unwrap(base.forward)
    used = {name: own.__globals__.get(name) for name in sorted(_names(own))}
    tried = {name: _rope_of(f) for name, f in used.items() if isinstance(f, (types.FunctionType, torch.nn.Module))}
    return tuple({name: pair[i] for name, pair in tried.items() if pair[i] is not None} for i in (0, 1))


def _forward_of(base, ropes):
    """base's forward with these functions for those of its module, or None."""
    own = inspect.unwrap(base.forward)
    # What it reads alone, and no __name__, by which torch.compile would look into the module itself.
    names = {*_names(own), "__builtins__", "__package__"}
    scope = {name: v for name, v in own.__globals__.items() if name in names}
    return _with(base.forward, {**scope, **ropes})


def _norms_of(module, base, ropes):
    """Names of the norms of heads whose results go right into the rotation. It is seen in its forward, on the CPU, with zeros for
    what its Linears give."""
    linears = {name: child for name, child in module._modules.items() if _sizes(child)}
    norms = {name: _norm_of(child, None)[0] for name, child in module._modules.items()
             if child is not None and name not in linears and "forward" not in vars(child)}
    norms = {name: (eps, state[1]) for name, state in norms.items() if state
             and (eps := getattr(module._modules[name], state[0])) is not None}
    names = list(inspect.signature(base.forward).parameters.values())[1:]
    at = next((i for i, p in enumerate(names) if p.name == "position_embeddings"), None)
    if not linears or not norms or not at:
        return (), 0
    made, seen = {}, []

    def linear(child):
        return lambda x: x.new_zeros(*x.shape[:-1], child.out_features)

    def norm(name):
        return lambda x: made.setdefault(name, x.clone())

    def rope(count):
        def of(*args, **kwargs):
            seen.extend(args[:count])
            if len(seen) > 1:
                raise StopIteration
            return args[0]
        return of
    zeros = lambda n: torch.zeros(1, 2, n, device="cpu")
    more = {p.name: None for p in names[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    more["position_embeddings"] = zeros(2), zeros(2)
    probe = _probe(module, {**{name: linear(child) for name, child in linears.items()}, **{name: norm(name) for name in norms}})
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            _forward_of(base, {name: rope(f._lk[0]) for name, f in ropes.items()})(
                probe, zeros(next(iter(linears.values())).in_features), **more)
    except Exception:
        pass  # what came so far is enough
    right = {name: norms[name] for name, y in made.items() for t in seen if t.data_ptr() == y.data_ptr()
             and t.numel() == y.numel() and t.shape[-1] == y.shape[-1] <= 256 and t.stride(-1) == 1}
    return tuple(right) if len(set(right.values())) == 1 else (), at


def _attention_of(module, _, path, tables):
    base = module._lk_base if isinstance(module, _Attention) else type(module)
    ropes, why = _ropes_of(base)
    if not ropes:
        return None, next((f"{name}: {reason}" for name, reason in why.items()), None)
    if _forward_of(base, ropes) is None:
        return None, "its forward is decorated by what is no function"
    if (why_not := _differing(path, ropes, tables)) is not None:
        return None, why_not
    what = "rope" + ", interleaved" * any(f._lk[1] for f in ropes.values()) + "".join(f", but not {name}" for name in why)
    return (*_norms_of(module, base, ropes), what), None


# ---- Classes ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _class(kind, base):
    """A subclass of base that computes by lk. It has base's name, which transformers and PEFT read."""
    body = {"_lk": None, "_lk_base": base, "_lk_call": None, "_lk_why": None, "__reduce_ex__": _reduce,
            "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if kind is _Attention:
        body["_lk_forward"] = _forward_of(base, _ropes_of(base)[0]) or base.forward
    if kind in (_Model, _Attention):  # with the signature of base's, which Trainer and generate read

        @functools.wraps(base.forward)
        def forward(self, *args, **kwargs):
            return kind.forward(self, *args, **kwargs)
        body["forward"] = forward
    return type(base.__name__, (kind, base), body)


def _reduce(self, protocol):
    cls = next(c for c in type(self).__mro__ if "_lk_base" in vars(c))
    if cls is not type(self):  # a class upon ours, FSDP's say, which does what it does without ours
        return super(cls, self).__reduce_ex__(protocol)
    return _new, cls.__bases__, self.__getstate__()


def _new(kind, base):
    return object.__new__(_class(kind, base))


_KINDS = {_Norm: _norm_of, _Mlp: _mlp_of, _Experts: _experts_of, _Attention: _attention_of, _Model: _head_of}


def _take(module, kind, state):
    if not isinstance(module, kind):
        module.__class__ = _class(kind, type(module))
    # In the module's own dict from here on: a graph that torch.compile made in the first call holds in the next.
    module._lk, module._lk_call, module._lk_why = state, None, vars(module).get("_lk_why")


class Patched:
    """What patch did, as a table: its lines are `rows` of (class, how many, what). `norms`, `heads`, `mlps` and `ropes` are how
    many it patched; `ropes` counts modules of attention."""

    def __init__(self, rows, norms, heads, mlps, ropes):
        self.rows, self.norms, self.heads, self.mlps, self.ropes = rows, norms, heads, mlps, ropes

    def __repr__(self):
        if not self.rows:
            return ("lk: nothing to patch: no RMS norm, no MLP with a gate, no rotary embedding, and no head with the loss of "
                    "transformers' causal models")
        width = max(len(name) for name, *_ in self.rows)
        return "\n".join(f"{name:{width}}  {count:5d}  {what}" for name, count, what in self.rows)


def patch(model, *, norms=True, head=True, mlp=True, rope=True, eval_logits=True, workspace_mib=None):
    """Lets lk compute the RMS norms, the gated MLPs, the rotary embeddings, and the head with its loss, of a model of
    transformers, or of one that wraps such a model. Returns a table of what it patched and of what it left, with the reason:
    print(lk_torch.patch(model)).

    What is patched is found by what it is, not by names: its own code is tried with a small input on the CPU.
      norms   a module with a weight of one dimension and an eps, whose forward computes x / sqrt(mean(x^2) + eps) * weight, or
              * (1 + weight) as Gemma's; or that times silu(gate), or that of x silu(gate), for forward(x, gate)
      mlp     a module whose last Linear takes act(gate(x)) * up(x), of two Linears or of one that has both, with an act of glu's.
              Linears are called as before, so with hooks and adapters. The act is called where it has hooks, and there the
              model's own code runs. Also experts of transformers, where its grouped products call their method _apply_gate
      rope    a function that an attention's forward calls from its module, as apply_rotary_pos_emb(q, k, cos, sin), and that
              turns halves or neighbours of all features, or of the first ones. The patched attention has a forward of its own
              with lk's function under this name, and with what else its module had at the first patch. The module itself stays
              as it is, and so do other models. A norm of heads right before it (QK norm) is computed with it, in one kernel,
              where it has no hooks. Of cos and sin that have each number twice, as those of transformers', one is read. So the
              model's rotary embeddings, called with x and position_ids, are tried too: where theirs have not, the attention is
              left. Cos and sin that come from elsewhere are taken on trust, since a look at each would wait for the device
      head    a Linear that is get_output_embeddings() of a model whose forward takes labels and calls its loss_function,
              transformers' ForCausalLMLoss

    With labels, in train(), the loss comes without logits: shifted labels, -100, ignore_index, shift_labels and
    num_items_in_batch as in transformers, with a softcap of the logits and a product with a number (Gemma 2, Cohere, Granite). A
    change of the logits' type, contiguous(), view() and a slice of the first classes pass too. Where a forward does something
    else with its logits, writes to them say, all are made, as without patch. A warning says so, once, and why.
    The output is the model's own, also its other losses, without logits: out.logits is None. A tuple (return_dict=False) has None
    in the logits' place, and the others keep theirs: (loss, None, cache, ...). An output that is no tuple leaves out what is None
    where it is indexed by a number, as transformers' always do: take out.loss and out.logits by name. In eval() logits are kept,
    unless eval_logits=False. Without labels, in generation say, the model's own head runs.

    workspace_mib bounds the memory of the loss, as in linear_cross_entropy. None is the fastest: in bfloat16 on an H100 2 bytes
    for each logit, at most a sixteenth of the device's memory. The loss runs while the activations of all layers are kept, so
    this memory is part of a step's peak. A smaller one lowers the peak, and takes more time.

    Results differ by roundings alone: lk rounds a norm, a gated product and a rotation once, transformers' Llama each step of it,
    and a loss is of logits that were not rounded to 16 bits. A label outside of the classes makes the loss NaN
    (LK_CHECK_TARGETS: README.md).

    Left to the model's own code, call by call: types other than float32, float16 and bfloat16, tensors of another device, a gate
    of another type than up, an MLP whose activation or limit was set to another one after patch, cos and sin of another type
    than q, where the model makes that type, or that need gradients, a head that PEFT has wrapped after patch, that is another
    one than at patch (resize_token_embeddings), or whose weight is a DTensor (tensor parallelism) or another subclass of Tensor
    (torchao's), and a loss function that was set. The same warning says so; call patch again where a head is new. A norm's eps
    is read in each call.
    The sum before a norm is not taken into it, since a block's own forward computes that.

    Parameters, state_dict, hooks, copies and pickles stay as they were, and so does the class's name. A hook of the head's
    Linear gets the loss for its output where the loss comes without logits. Call patch before or after PEFT's get_peft_model;
    before torch.compile and fully_shard. A module whose forward was replaced, by accelerate's hooks of a device_map say, is
    left. norms=False, mlp=False, rope=False or head=False leaves these."""
    LF._mib(workspace_mib)  # raises here, not in a loss
    rows, totals, gathered = {}, dict.fromkeys(_KINDS, 0), any(map(_fsdp, model.modules()))
    tables = _tables_in(model) if rope else {}
    wanted = {_Norm: norms, _Mlp: mlp, _Experts: mlp, _Attention: rope, _Model: head}
    for path, module in list(model.named_modules()):
        cls = type(module)
        for kind, look in _KINDS.items():
            if not wanted[kind] or cls.__module__.startswith("lk_torch."):
                continue
            state, why = look(module, gathered, *([path, tables] if kind is _Attention else []))
            if state is None and why is None:
                continue
            if why is None and "forward" in vars(module):
                why = "its forward was replaced, by a hook of accelerate say"
            if why is not None:
                what = f"left: {why}"
                if isinstance(module, kind):  # patched before
                    module._lk = None
            elif kind is _Model:
                _take(module._modules[state[0]], _Head, True)
                _take(module, _Model, (*state[:2], eval_logits, workspace_mib))
                what = f"linear_cross_entropy: {state[0]} and its loss"
                what += f", not so in its last call: {module._lk_why}" if module._lk_why else ""
            else:
                _take(module, kind, state)
                what = state[-1] if kind is _Attention else "rms_norm" if kind is _Norm else "glu: "
                if kind is _Attention and state[0] and norms:
                    what += f", with {' and '.join(state[0])}"
                if kind is _Norm and state[4] is not None:
                    what += " with a gate" + (" first" if state[4] else "") + (", or without" if state[3] else "")
                if kind is _Norm and state[1]:
                    what += ", weight_offset 1"
                if kind in (_Mlp, _Experts):
                    what += ", ".join(v if name == "activation" else f"{name} {v}" for name, v in state[-1].items())
            totals[kind] += why is None
            rows[cls.__name__, what] = rows.get((cls.__name__, what), 0) + 1
    return Patched([(name, count, what) for (name, what), count in rows.items()], totals[_Norm], totals[_Model],
                   totals[_Mlp] + totals[_Experts], totals[_Attention])


def unpatch(model):
    """Takes patch back. Returns how many modules it changed."""
    count = 0
    for module in model.modules():
        if isinstance(module, (*_KINDS, _Head)) and module._lk is not None:
            module._lk = None
            if "_lk_base" in vars(type(module)):  # else a class lies upon ours, FSDP's say: it stays, and calls the model's own
                module.__class__ = type(module)._lk_base
                for name in ("_lk", "_lk_call", "_lk_why"):
                    vars(module).pop(name, None)
            count += 1
    return count
