# SPDX-License-Identifier: MIT
"""lk under a model that exists: patch(model), unpatch(model). It knows transformers' models by their structure and imports
nothing of them.

A patched module has a class of the same name, a subclass of its own, whose forward calls lk. So parameters, hooks, isinstance,
state_dicts, copies and pickles stay as they were."""
import functools
import inspect
import sys
import warnings

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from . import functional as LF

_DEVICE = "cuda" if _C.BACKEND == "cuda" else "cpu"


def _here(x):
    return x.dtype in LF._TYPES and x.device.type == _DEVICE


# ---- Norms ------------------------------------------------------------------------------------------------------------------


class _Norm:
    """_lk is (eps, weight_offset, mixed) while patched. mixed: with a float32 weight a 16-bit result stays one of 16 bits."""

    def forward(self, x, *args, **kwargs):
        lk = self._lk
        if lk is None or args or kwargs or not _here(x) or x.dtype != self.weight.dtype and not (
                lk[2] and self.weight.dtype == torch.float32):
            return super().forward(x, *args, **kwargs)
        return LF.rms_norm(x, self.weight.shape, self.weight, lk[0], weight_offset=lk[1])


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
    eps, n = next(iter(eps.values())), weight.shape[0]
    # Its class computes a copy with random weights in float32 on the CPU, whatever the model's type and device, meta included.
    generator = torch.Generator().manual_seed(1)
    probe = object.__new__(type(module))
    probe.__dict__.update(vars(module), _lk=None)
    w = torch.rand(n, generator=generator) + 0.5
    probe._parameters = {**module._parameters, "weight": torch.nn.Parameter(w)}
    x = torch.randn(3, 2, n, generator=generator)
    number = torch.finfo(torch.float32).eps if eps is None else eps
    x[1] *= number**0.5  # here eps is half of the result
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            forward = functools.partial(type(module).forward, probe)
            y, mixed = forward(x), forward(x.bfloat16()).dtype == torch.bfloat16
            probe._parameters["weight"] = torch.nn.Parameter(w.bfloat16())
            if forward(x.bfloat16()).dtype != torch.bfloat16:
                return None, "of bfloat16 it makes another type"
        wide = x.double()
        unit = wide * (wide.square().mean(-1, keepdim=True) + number).rsqrt()
        for offset in (0.0, 1.0):
            # float32: the sum of squares, its square root and three products, each some units of 2^-24
            if y.shape == x.shape and ((y - unit * (offset + w)).abs() <= 32 * 2.0**-24 * (unit * (offset + w)).abs()).all():
                return (eps, offset, mixed), None
    except Exception as error:
        return None, f"on a small input it raises {type(error).__name__}"
    return None, "on a small input it is no RMS norm"


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


class _Logits:
    """Stands for factor * z, or with cap for cap * tanh(factor / cap * z), between a model's head and its loss. z is head(x), or
    its first classes. What is not a product with a number, a tanh, a change of type, a view with other rows, or such a slice,
    takes it for what it stands for. Then that is computed, as the model would, step by step from what each was made from, its
    base. It is known from there on, since it may be written to, and so is each alias, whose step gives a view of its base."""

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

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(name), name)

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("mul", "div", "tanh", "reshape") and args and isinstance(args[0], _Logits) and not kwargs:
            return getattr(args[0], name)(*args[1:])
        real = lambda v: v.tensor(name) if isinstance(v, _Logits) else v
        return function(*map(real, args), **{k: real(v) for k, v in (kwargs or {}).items()})


def _wanted(value):
    return not isinstance(value, _Logits) or value.known is not None


def _known(value):
    return value.known if isinstance(value, _Logits) else value


def _by_tensor(name):
    return lambda self, *args: getattr(self.tensor(name), name)(*args)


for _name in ("add radd sub rsub rtruediv floordiv mod pow rpow neg abs eq ne lt le gt ge and or invert matmul setitem "
              "iter bool").split():
    setattr(_Logits, f"__{_name}__", _by_tensor(f"__{_name}__"))
_Logits.__mul__ = _Logits.__rmul__ = _Logits.mul
_Logits.__truediv__ = _Logits.div
_Logits.__hash__ = object.__hash__


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
            return tuple(map(_known, filter(_wanted, out)))
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


# ---- Classes ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _class(kind, base):
    """A subclass of base that computes by lk. It has base's name, which transformers and PEFT read."""
    body = {"_lk": None, "_lk_base": base, "_lk_call": None, "_lk_why": None, "__reduce_ex__": _reduce,
            "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    if kind is _Model:  # with the signature of base's, which Trainer and generate read

        @functools.wraps(base.forward)
        def forward(self, *args, **kwargs):
            return _Model.forward(self, *args, **kwargs)
        body["forward"] = forward
    return type(base.__name__, (kind, base), body)


def _reduce(self, protocol):
    cls = next(c for c in type(self).__mro__ if "_lk_base" in vars(c))
    if cls is not type(self):  # a class upon ours, FSDP's say, which does what it does without ours
        return super(cls, self).__reduce_ex__(protocol)
    return _new, cls.__bases__, self.__dict__


def _new(kind, base):
    return object.__new__(_class(kind, base))


def _take(module, kind, state):
    if not isinstance(module, kind):
        module.__class__ = _class(kind, type(module))
    # In the module's own dict from here on: a graph that torch.compile made in the first call holds in the next.
    module._lk, module._lk_call, module._lk_why = state, None, vars(module).get("_lk_why")


class Patched:
    """What patch did, as a table: its lines are `rows` of (class, how many, what). `norms` and `heads` are how many it patched."""

    def __init__(self, rows, norms, heads):
        self.rows, self.norms, self.heads = rows, norms, heads

    def __repr__(self):
        if not self.rows:
            return "lk: nothing to patch: no RMS norm, and no head with the loss of transformers' causal models"
        width = max(len(name) for name, *_ in self.rows)
        return "\n".join(f"{name:{width}}  {count:5d}  {what}" for name, count, what in self.rows)


def patch(model, *, norms=True, head=True, eval_logits=True, workspace_mib=None):
    """Lets lk compute the RMS norms, and the head with its loss, of a model of transformers, or of one that wraps such a model.
    Returns a table of what it patched and of what it left, with the reason: print(lk_torch.patch(model)).

    What is patched is found by what it is, not by names. A norm is a module with a weight of one dimension and an eps, whose
    forward computes x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) as Gemma's: its own class is tried with a small input
    on the CPU. A head is a Linear that is get_output_embeddings() of a model whose forward takes labels and calls its
    loss_function, transformers' ForCausalLMLoss.

    With labels, in train(), the loss comes without logits: shifted labels, -100, ignore_index, shift_labels and
    num_items_in_batch as in transformers, with a softcap of the logits and a product with a number (Gemma 2, Cohere, Granite). A
    change of the logits' type, contiguous(), view() and a slice of the first classes pass too. Where a forward does something
    else with its logits, writes to them say, all are made, as without patch. A warning says so, once, and why.
    The output is the model's own, also its other losses, without logits: out.logits is None. In eval() logits are kept, unless
    eval_logits=False. Without labels, in generation say, the model's own head runs.

    workspace_mib bounds the memory of the loss, as in linear_cross_entropy. None is the fastest: in bfloat16 on an H100 2 bytes
    for each logit, at most a sixteenth of the device's memory. The loss runs while the activations of all layers are kept, so
    this memory is part of a step's peak. A smaller one lowers the peak, and takes more time.

    Results differ by roundings alone: lk rounds a norm once, transformers' Llama twice, and a loss is of logits that were not
    rounded to 16 bits. A label outside of the classes makes the loss NaN (LK_CHECK_TARGETS: README.md).

    Left to the model's own code, call by call: types other than float32, float16 and bfloat16, tensors of another device, a
    head that PEFT has wrapped after patch, that is another one than at patch (resize_token_embeddings), or whose weight is a
    DTensor (tensor parallelism) or another subclass of Tensor (torchao's), and a loss function that was set. The same warning
    says so; call patch again where a head is new.
    The sum before a norm is not taken into it, since a block's own forward computes that.

    Parameters, state_dict, hooks, copies and pickles stay as they were, and so does the class's name. A hook of the head's
    Linear gets the loss for its output where the loss comes without logits. Call patch before or after PEFT's get_peft_model;
    before torch.compile and fully_shard. A module whose forward was replaced, by accelerate's hooks of a device_map say, is
    left. norms=False or head=False leaves these."""
    LF._mib(workspace_mib)  # raises here, not in a loss
    rows, totals, gathered = {}, {_Norm: 0, _Model: 0}, any(map(_fsdp, model.modules()))
    for module in list(model.modules()):
        cls = type(module)
        for kind, wanted, look in ((_Norm, norms, _norm_of), (_Model, head, _head_of)):
            if not wanted:
                continue
            if cls.__module__.startswith("lk_torch."):
                continue
            state, why = look(module, gathered)
            if state is None and why is None:
                continue
            if why is None and "forward" in vars(module):
                why = "its forward was replaced, by a hook of accelerate say"
            if why is not None:
                what = f"left: {why}"
                if isinstance(module, kind):  # patched before
                    module._lk = None
            elif kind is _Norm:
                _take(module, _Norm, state)
                what = "rms_norm" + (", weight_offset 1" if state[1] else "")
            else:
                _take(module._modules[state[0]], _Head, True)
                _take(module, _Model, (*state[:2], eval_logits, workspace_mib))
                what = f"linear_cross_entropy: {state[0]} and its loss"
                what += f", not so in its last call: {module._lk_why}" if module._lk_why else ""
            totals[kind] += why is None
            rows[cls.__name__, what] = rows.get((cls.__name__, what), 0) + 1
    return Patched([(name, count, what) for (name, what), count in rows.items()], totals[_Norm], totals[_Model])


def unpatch(model):
    """Takes patch back. Returns how many modules it changed."""
    count = 0
    for module in model.modules():
        if isinstance(module, (_Norm, _Head, _Model)) and module._lk is not None:
            module._lk = None
            if "_lk_base" in vars(type(module)):  # else a class lies upon ours, FSDP's say: it stays, and calls the model's own
                module.__class__ = type(module)._lk_base
                for name in ("_lk", "_lk_call", "_lk_why"):
                    vars(module).pop(name, None)
            count += 1
    return count
