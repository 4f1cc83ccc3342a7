// SPDX-License-Identifier: MIT
// The module lk_torch._C. Importing it registers torch.ops.lk.*; its functions are those ops, called with less work in Python.
#include <Python.h>

#include "lk_torch.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

namespace lk_torch {

const char ops_namespace[] = "lk";

// An argument of type A: whether a Python object is plainly one, and its value.
template <class A> struct Argument;
template <> struct Argument<Tensor> {
    static bool fits(PyObject *o) { return THPVariable_CheckExact(o); }
    static const Tensor &get(PyObject *o) { return THPVariable_Unpack(o); }
};
template <> struct Argument<int64_t> {
    static bool fits(PyObject *o)
    {
        int overflow = 0;
        return PyLong_CheckExact(o) && (PyLong_AsLongLongAndOverflow(o, &overflow), !overflow);
    }
    static int64_t get(PyObject *o) { return PyLong_AsLongLong(o); }
};
template <> struct Argument<c10::SymInt> : Argument<int64_t> {};
template <> struct Argument<double> {
    static bool fits(PyObject *o) { return PyFloat_CheckExact(o); }
    static double get(PyObject *o) { return PyFloat_AS_DOUBLE(o); }
};
template <> struct Argument<bool> {
    static bool fits(PyObject *o) { return PyBool_Check(o); }
    static bool get(PyObject *o) { return o == Py_True; }
};
template <> struct Argument<at::ScalarType> {
    static bool fits(PyObject *o) { return THPDtype_Check(o); }
    static at::ScalarType get(PyObject *o) { return ((THPDtype *)o)->scalar_type; }
};
template <class A> struct Argument<std::optional<A>> {
    static bool fits(PyObject *o) { return o == Py_None || Argument<A>::fits(o); }
    static std::optional<A> get(PyObject *o) { return o == Py_None ? std::nullopt : std::optional<A>(Argument<A>::get(o)); }
};

// What an argument of type A may be at most, in words, or NULL: the dispatcher says the rest.
template <class A> const char *wrong_kind(PyObject *) { return nullptr; }
template <> const char *wrong_kind<Tensor>(PyObject *o)
{
    return THPVariable_Check(o) || PyObject_HasAttrString(o, "__torch_function__") ? nullptr : "a tensor";
}
template <> const char *wrong_kind<Maybe>(PyObject *o)
{
    return o == Py_None || !wrong_kind<Tensor>(o) ? nullptr : "a tensor or None";
}
template <> const char *wrong_kind<std::optional<at::ScalarType>>(PyObject *o)
{
    return o == Py_None || THPDtype_Check(o) ? nullptr : "a torch.dtype or None";
}
template <> const char *wrong_kind<bool>(PyObject *o) { return PyBool_Check(o) ? nullptr : "True or False"; }
template <> const char *wrong_kind<int64_t>(PyObject *o)
{
    return PyIndex_Check(o) || PyObject_HasAttrString(o, "node") ? nullptr : "an integer"; // node: of a SymInt
}

static PyObject *to_python(Tensor &&t) { return THPVariable_Wrap(std::move(t)); }
template <class... T> PyObject *to_python(tuple<T...> &&tensors)
{
    PyObject *out = PyTuple_New(sizeof...(T));
    Py_ssize_t i = 0;
    std::apply([&](T &...t) { (PyTuple_SET_ITEM(out, i++, THPVariable_Wrap(std::move(t))), ...); }, tensors);
    return out;
}

// An op as a Python function of positional arguments. torch.ops.lk.<name> does the same for arguments of any kind, in more
// time. It takes over where an argument is a subclass of Tensor, or no plain number, and where a mode wants to see the call.
template <auto F> struct Function;
template <class R, class... A, R (*F)(A...)> struct Function<F> {
    inline static const char *name;

    template <size_t... I> static PyObject *call(PyObject *const *args, Py_ssize_t count, std::index_sequence<I...>)
    {
        static const auto op = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow((std::string(ops_namespace) + "::" + name).c_str(), "")
                                   .typed<R(A...)>();
        if (count != sizeof...(A) || at::impl::torch_function_mode_enabled() ||
            !(Argument<std::decay_t<A>>::fits(args[I]) && ...)) {
            const auto check = [&](size_t i, const char *kind) {
                TORCH_CHECK_TYPE(!kind, "lk: ", public_name(name, op.schema().arguments()[i].name()), " is of type ",
                                 Py_TYPE(args[i])->tp_name, "; it must be ", kind);
            };
            if (count == sizeof...(A)) (check(I, wrong_kind<std::decay_t<A>>(args[I])), ...);
            static PyObject *slow = nullptr;
            if (!slow) {
                const py::object ops = py::module_::import("torch").attr("ops").attr(ops_namespace);
                slow = py::object(ops.attr(name).attr("default")).release().ptr();
            }
            return PyObject_Vectorcall(slow, args, count, nullptr);
        }
        std::tuple<decltype(Argument<std::decay_t<A>>::get(args[I]))...> values{Argument<std::decay_t<A>>::get(args[I])...};
        R out = [&] {
            const py::gil_scoped_release no_gil;
            return op.call(std::get<I>(std::move(values))...);
        }();
        return to_python(std::move(out));
    }
    static PyObject *fast(PyObject *, PyObject *const *args, Py_ssize_t count)
    {
        HANDLE_TH_ERRORS
        return call(args, count, std::index_sequence_for<A...>());
        END_HANDLE_TH_ERRORS
    }
    static PyMethodDef method(const char *op)
    {
        name = op;
        return {op, (PyCFunction)(void (*)())fast, METH_FASTCALL, nullptr};
    }
};

} // namespace lk_torch

PyMODINIT_FUNC PyInit__C()
{
    using namespace lk_torch;
#define METHOD(op) Function<&op>::method(#op)
    static PyMethodDef methods[] = {METHOD(rms_norm), METHOD(add_rms_norm), METHOD(rms_norm_fp8), METHOD(rms_norm_gated),
                                    METHOD(glu), METHOD(rope),
                                    METHOD(logsumexp), METHOD(kl), METHOD(cross_entropy),
                                    METHOD(cross_entropy_with_grad), METHOD(cross_entropy_stats),
                                    METHOD(cross_entropy_ids), METHOD(linear_cross_entropy),
                                    METHOD(linear_cross_entropy_stats), METHOD(linear_cross_entropy_ids), METHOD(linear_kl), {}};
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
    PyObject *m = PyModule_Create(&module);
    if (m) PyModule_AddStringConstant(m, "BACKEND", LK_DEVICE_TYPE == at::kCPU ? "cpu" : "cuda");
    if (m) PyModule_AddStringConstant(m, "NAMESPACE", ops_namespace);
    if (m) PyModule_AddStringConstant(m, "TORCH", TORCH_VERSION);
    if (m) PyModule_AddIntConstant(m, "LK_VERSION", lk_version());
    return m;
}
