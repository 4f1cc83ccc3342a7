# SPDX-License-Identifier: MIT
"""Calls of lk's functions from JAX: the compiled handlers (../lk_jax.cpp), the workspace, vmap."""
import ctypes
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


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
    library.lk_jax_platform.restype = library.lk_jax_last_error.restype = ctypes.c_char_p
    return library


@functools.cache
def _register(function):
    """Registers the handler of a function, lk_logsumexp_forward_f32 for example."""
    library = _library()
    handler = getattr(library, f"lk_jax_{function}")
    jax.ffi.register_ffi_target(f"lk_{function}", jax.ffi.pycapsule(handler), platform=library.lk_jax_platform().decode())


@functools.cache
def _target(function):
    """Registers a function; returns its query for the workspace."""
    _register(function)
    query = getattr(_library(), f"lk_jax_{function}_bytes")
    query.restype = ctypes.c_int64
    return query


def platform():
    """JAX's platform that this build has handlers for: CUDA, or cpu for lk's simulator."""
    return _library().lk_jax_platform().decode()


def _workspace_bytes(function, tensors, fields):
    """lk's answer. lk checks shapes and options here, so a mistake is an exception while JAX traces."""
    names = (ctypes.c_char_p * len(fields))(*(name.encode() for name in fields))
    values = (ctypes.c_double * len(fields))(*fields.values())
    found = _target(function)(" ".join(tensors).encode(), len(fields), names, values)
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
        return found, (True,) * len(outputs)

    return dict(zip(outputs, run(*inputs.values())))


@jax.custom_batching.custom_vmap
def rescale(x, factor, divisor):
    """x times factor / divisor, numbers in device memory, in x's own memory. Where they are equal x is not read or written."""
    function = f"rescale_{TYPES[x.dtype.name]}"
    _register(function)
    return jax.ffi.ffi_call(f"lk_{function}", _struct(jax.ShapeDtypeStruct(x.shape, x.dtype), (x, factor, divisor)),
                            input_output_aliases={0: 0})(x, factor, divisor)


@rescale.def_vmap
def _rescale_rule(size, batched, x, factor, divisor):
    if not (batched[1] or batched[2]):
        return rescale(x, factor, divisor), True
    x = x if batched[0] else x[None]
    return (x.astype(jnp.float32) * (factor / divisor).reshape(-1, *(1,) * (x.ndim - 1))).astype(x.dtype), True
