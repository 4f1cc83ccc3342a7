# SPDX-License-Identifier: MIT
"""Calls of lk's functions from JAX: the compiled handlers (../lk_jax.cpp), the workspace, vmap, meshes of explicit axes."""
import ctypes
import functools
import inspect
import math
import os

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_SYMBOLIC = "lk's calls are compiled for sizes that are known: export one program for each size"


@functools.cache
def _library():
    """The handlers. They are loaded by the first call, and after JAX's own CUDA libraries, which lk then shares."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "liblk_jax.so")
    if not os.path.exists(path):
        raise ImportError(f"lk_jax is not built: {path} is missing. Run packages/jax/build.py.")
    jax.default_backend()  # loads JAX's
    if not any(name.startswith(("liblk.so", "liblk_simt")) for name in os.listdir(os.path.dirname(path))):
        try:
            import lk  # built with the kernels of lk-kernels: lk_jax's library finds lk's by its name
            ctypes.CDLL(lk.library())
        except (AttributeError, ImportError, OSError) as error:
            raise ImportError(f"lk_jax was built with the kernels of lk-kernels, which do not load: {error}. Install lk-kernels of "
                              "the same version, or build lk_jax with LK_KERNELS=0, which compiles them") from error
    library = ctypes.CDLL(path)
    library.lk_jax_platform.restype = library.lk_jax_last_error.restype = library.lk_jax_functions.restype = ctypes.c_char_p
    for function in library.lk_jax_functions().decode().split():
        handler = getattr(library, f"lk_jax_{function}")
        jax.ffi.register_ffi_target(f"lk_{function}", jax.ffi.pycapsule(handler), platform=library.lk_jax_platform().decode())
    return library


@functools.cache
def _query(function):
    """A function's query for the workspace."""
    query = getattr(_library(), f"lk_jax_{function}_bytes")
    query.restype = ctypes.c_int64
    return query


def platform():
    """JAX's platform that this build has handlers for: CUDA, or cpu for lk's simulator."""
    return _library().lk_jax_platform().decode()


def targets():
    """The names of lk's custom calls, which jax.export asks for. They are registered then: call it before a program that another
    process has exported."""
    return tuple(f"lk_{function}" for function in _library().lk_jax_functions().decode().split())


def _workspace_bytes(function, tensors, fields):
    """lk's answer. lk checks shapes and options here, so a mistake is an exception while JAX traces."""
    if unknown := [name for name, value in fields.items() if jax.export.is_symbolic_dim(value)]:
        raise ValueError(f"{unknown[0]} is {fields[unknown[0]]}, a symbolic dimension; {_SYMBOLIC}")
    names = (ctypes.c_char_p * len(fields))(*(name.encode() for name in fields))
    values = (ctypes.c_double * len(fields))(*fields.values())
    found = _query(function)(" ".join(tensors).encode(), len(fields), names, values)
    if found < -2:  # minus the bytes; thousandths of a MiB, rounded up
        given = fields["workspace_bytes"] / 2**20
        given = round(given, 4) or given
        raise ValueError(f"workspace_mib is {given:.6g}; {function} of these sizes needs "
                         f"{math.ceil(-found * 1000 / 2**20) / 1000:.10g} or more")
    if found < 0:
        raise ValueError(_library().lk_jax_last_error().decode() if found == -1 else f"unknown name in {tensors, fields}")
    return found


def axes_of(array):
    """The axes of a shard_map along which the array differs."""
    return jax.typeof(array).manual_axis_type.varying


def _struct(like, inputs):
    """The type of a result: it differs along all axes along which some input does."""
    axes = frozenset().union(*map(axes_of, inputs))
    if not axes:
        return like
    mesh = next(jax.typeof(a).sharding.mesh for a in inputs if axes_of(a))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(None,) * len(like.shape)))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding,
                                manual_axis_type=jax.sharding.ManualAxisType(varying=axes))


def spread(array, axes):
    """Lets an array differ along these axes too. JAX then sums the gradient of one that did not."""
    more = () if array is None else tuple(axes - axes_of(array))
    return jax.lax.pcast(array, more, to="varying") if more else array


def same_axes(*arrays):
    """In a shard_map, lets all arrays differ along the same axes."""
    axes = frozenset().union(*(axes_of(a) for a in arrays if a is not None))
    return [spread(a, axes) for a in arrays]


# ---- A mesh of explicit axes, outside of shard_map -------------------------------------------------------------------------
# There an array's type says how it is split, and a custom_vjp's gradients must have the types of its arguments. A call of lk is
# of whole arrays. So each public function gathers its arguments, in JAX's own operation, whose gradient is split as they were,
# and splits its results again.


def _unsplit(array):
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec) and not sharding.spec.unreduced:
        return array
    return jax.sharding.reshard(array, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))


def _split_as(array, like, dims=None):
    """array, its first dimensions split as those of `like`, as far as they are the same and at most `dims`."""
    sharding = jax.typeof(like).sharding
    same = next((i for i, (a, b) in enumerate(zip(array.shape, like.shape)) if a != b), min(array.ndim, like.ndim))
    spec = sharding.spec[:same][:dims]
    if not any(spec):
        return array
    return jax.sharding.reshard(array, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec)))


def public(f):
    """For each public function: its arrays may be split over explicit axes of a mesh. Results are split as the first one is."""
    first = next(iter(inspect.signature(f).parameters))

    @functools.wraps(f)
    def g(*args, **kwargs):
        arrays = [a for a in jax.tree.leaves((args, kwargs)) if isinstance(a, jax.Array)]
        for a in arrays:
            if any(map(jax.export.is_symbolic_dim, a.shape)):
                raise ValueError(f"an array has the shape {a.shape}, with a symbolic dimension; {_SYMBOLIC}")
        if not any(_unsplit(a) is not a for a in arrays):
            return f(*args, **kwargs)
        like = args[0] if args else kwargs[first]
        args, kwargs = jax.tree.map(lambda a: _unsplit(a) if isinstance(a, jax.Array) else a, (args, kwargs))
        results = f(*args, **kwargs)
        return jax.tree.map(lambda a: _split_as(a, like), results) if isinstance(like, jax.Array) else results
    return g


def _bind(function, inputs, outputs, fields, alias):
    """The custom call itself. inputs: {field: array}, outputs: {field: ShapeDtypeStruct}, fields: all numbers but 0."""
    alias = {list(inputs).index(i): list(outputs).index(o) for i, o in alias}
    size = _workspace_bytes(function, [*inputs, *outputs], fields)
    outputs = dict(outputs, workspace=jax.ShapeDtypeStruct((size,), jnp.uint8)) if size else outputs
    fields = {k: v for k, v in fields.items() if k != "workspace_bytes"}  # the result has that many
    results = jax.ffi.ffi_call(f"lk_{function}", [_struct(o, inputs.values()) for o in outputs.values()],
                               input_output_aliases=alias)(
        *inputs.values(), inputs=" ".join(inputs), outputs=" ".join(outputs),
        **{k: np.float32(v) if isinstance(v, float) else np.int64(v) for k, v in fields.items()})
    return tuple(results[:len(outputs) - bool(size)])


def call(function, inputs, outputs, fields, rows, shared=(), alias=(), behind=()):
    """Calls lk_<function>. Returns {field: array} of the outputs.

    inputs: {field: array}; outputs: {field: ShapeDtypeStruct}; those that are None are not given. fields: the numbers of the
    struct. rows: which of them counts the rows; max_counted, if given, bounds those that count. shared: the inputs and outputs that have no dimension of rows, such as weights
    and reduced losses. alias: pairs of an input and an output in the same memory. behind: tensors whose rows come
    after a first dimension of another kind.

    A result has no derivative: custom_vjp stands around the calls of forward, so it is a second one that would be asked for.

    vmap makes the new dimension part of the rows, in one call, where every shared tensor is common to all. Where there is one
    such tensor for each element, vmap calls once for each.
    """
    inputs = {k: v for k, v in inputs.items() if v is not None}
    outputs = {k: v for k, v in outputs.items() if v is not None}
    fields = {k: v for k, v in fields.items() if v or k == rows}

    @jax.custom_batching.custom_vmap
    def run(*arrays):
        return _bind(function, dict(zip(inputs, arrays)), outputs, fields, alias)

    @run.def_vmap
    def rule(size, batched, *arrays):
        like = next(a for a, b in zip(arrays, batched) if b)
        arrays = [_unsplit(a) for a in arrays]
        common = all(k not in shared or not b for k, b in zip(inputs, batched)) and not any(k in shared for k in outputs)
        if common:
            arrays = [a if k in shared or b else jnp.broadcast_to(a, (size, *a.shape))
                      for k, a, b in zip(inputs, arrays, batched)]
            arrays = [jnp.moveaxis(a, 0, 1) if k in behind else a for k, a in zip(inputs, arrays)]
            more = {k: jax.ShapeDtypeStruct((*o.shape[:k in behind], size, *o.shape[k in behind:]), o.dtype)
                    for k, o in outputs.items()}
            larger = {k: v * size if k in (rows, "max_counted") else v for k, v in fields.items()}
            found = call(function, dict(zip(inputs, arrays)), more, larger, rows, shared, alias, behind)
            found = tuple(jnp.moveaxis(a, 1, 0) if k in behind else a for k, a in found.items())
        else:
            def one(mapped):
                mapped = iter(mapped)
                return run(*(next(mapped) if b else a for a, b in zip(arrays, batched)))
            found = jax.lax.map(one, tuple(a for a, b in zip(arrays, batched) if b))
        return tuple(_split_as(a, like, 1) for a in found), (True,) * len(outputs)

    return dict(zip(outputs, _no_derivative(function, run)(*inputs.values())))


def _no_derivative(function, run):
    """run, with a sentence where its derivative is asked for."""
    run_once = jax.custom_jvp(run)

    @run_once.defjvp
    def refuse(primals, tangents):
        raise TypeError(f"a result of lk_{function} would need a derivative, and has none: lk has first derivatives alone, no "
                        "derivatives of a gradient")
    return run_once


@jax.custom_batching.custom_vmap
def _rescale(x, factor, divisor):
    """x times factor / divisor, numbers in device memory, in x's own memory. Where they are equal x is not read or written."""
    _library()
    result = _struct(jax.ShapeDtypeStruct(x.shape, x.dtype), (x, factor, divisor))
    return jax.ffi.ffi_call(f"lk_rescale_{TYPES[x.dtype.name]}", result, input_output_aliases={0: 0})(x, factor, divisor)


@_rescale.def_vmap
def _rescale_rule(size, batched, x, factor, divisor):
    if not (batched[1] or batched[2]):
        return _split_as(_rescale(_unsplit(x), factor, divisor), x), True
    x = x if batched[0] else x[None]
    return (x.astype(jnp.float32) * (factor / divisor).reshape(-1, *(1,) * (x.ndim - 1))).astype(x.dtype), True


rescale = _no_derivative("rescale", _rescale)
