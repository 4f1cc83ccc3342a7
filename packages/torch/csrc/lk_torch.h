// SPDX-License-Identifier: MIT
// What the ops share. Each op is one .cpp file: kernels below autograd, the node of its backward, the op that a user calls.
//
//   lk::<op>                      what functional.py calls. It records a node if a gradient is wanted, and calls a kernel
//   lk::<op>_forward, _backward   the kernels: plain functions of tensors, with fake versions in _fake.py. In these files a tensor
//                                 that was not asked for is undefined; the dispatcher gets one without elements (kernel, below)
//
// The files see lk's C interface alone. g++ compiles them for both backends: LK_TORCH_CPU is the simulator with CPU tensors.
#pragma once

#include <atomic>
#include <map>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#ifdef LK_TORCH_CPU
#define LK_DEVICE CPU
#define LK_DEVICE_TYPE at::kCPU
#define LK_AUTOCAST AutocastCPU
#define LK_DEVICE_NAME "the CPU (the simulator)"
#else
#define LK_DEVICE CUDA
#define LK_DEVICE_TYPE at::kCUDA
#define LK_AUTOCAST AutocastCUDA
#define LK_DEVICE_NAME "CUDA devices"
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "lk/cross_entropy.cuh"

namespace lk_torch {

using at::Tensor;
using std::tuple;
using Maybe = std::optional<Tensor>;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
// Kernels called from a node, or from an op that has made its node, record nothing.
using Below = at::AutoDispatchBelowADInplaceOrView;

// The namespace of the ops in torch.ops: "lk", in module.cpp. packages/hub links the other files with a name of its own.
extern const char ops_namespace[];

// The ops that a user calls.
Tensor rms_norm(const Tensor &x, c10::SymInt cols, const Maybe &weight, const Maybe &bias, std::optional<double> eps,
                double weight_offset);
tuple<Tensor, Tensor> add_rms_norm(const Tensor &x, const Tensor &residual, c10::SymInt cols, const Maybe &weight,
                                   const Maybe &bias, std::optional<double> eps, double weight_offset, bool round_sum);
tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
rms_norm_fp8(const Tensor &x, const Maybe &residual, c10::SymInt cols, const Maybe &weight, std::optional<double> eps,
             double weight_offset, int64_t scaling, bool e5m2, bool power_of_two, int64_t scale_rounding, const Maybe &scale,
             bool want_amax, bool want_transposed, bool round_sum);
Tensor rms_norm_gated(const Tensor &x, const Tensor &gate, c10::SymInt cols, const Maybe &weight, std::optional<double> eps,
                      double weight_offset, bool gate_first);
Tensor glu(const Tensor &gate, const Maybe &up, const Maybe &row_weight, int64_t activation, double alpha,
           std::optional<double> limit, double up_offset, bool interleaved);
tuple<Tensor, Tensor> rope(const Tensor &q, const Maybe &k, const Maybe &inv_freq, const Maybe &position, const Maybe &cos,
                           const Maybe &sin, const Maybe &pair_axis, const Maybe &q_weight, const Maybe &k_weight,
                           int64_t rotary_dim, bool interleaved, bool heads_first, c10::SymInt offset, double scale, double eps,
                           double weight_offset);
Tensor logsumexp(const Tensor &x, int64_t dim, bool keepdim, double scale, std::optional<at::ScalarType> dtype);
tuple<Tensor, Tensor> kl(const Tensor &x, const Tensor &teacher, const Maybe &row_weight, int64_t divergence, double beta,
                         double logit_scale, double teacher_scale, double softcap, double teacher_softcap, bool want_entropy);
#define LK_LOSS_PARAMETERS                                                                                                     \
    int64_t reduction, int64_t ignore_index, double label_smoothing, double z_loss, double softcap, double logit_scale,        \
        bool zero_when_empty, const Maybe &denominator, const Maybe &row_weight
#define LK_LOSS_OPTIONS                                                                                                        \
    reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty, denominator, row_weight
#define LK_LOSS_SCHEMA                                                                                                         \
    "int reduction, int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale, "                 \
    "bool zero_when_empty, Tensor? denominator, Tensor? row_weight"
// Classes that are split over the ranks of a group of torch.distributed, or into slices on one: the group's name, "" for none; this
// rank; and how many slices of classes it has, as every rank. shards: how many classes each slice of all ranks has, in order.
#define LK_SHARDS_PARAMETERS at::IntArrayRef shards, int64_t rank, int64_t slices
#define LK_SHARDS_SCHEMA ", int[] shards, int rank, int slices"
#define LK_SHARDS shards, rank, slices
#define LK_RANKS_PARAMETERS std::string group, LK_SHARDS_PARAMETERS
#define LK_RANKS_SCHEMA ", str group" LK_SHARDS_SCHEMA
#define LK_RANKS group, LK_SHARDS
// A head's besides: the parts of its HeadInput.
#define LK_HEAD_RANKS_PARAMETERS LK_RANKS_PARAMETERS, int64_t parts
#define LK_HEAD_RANKS LK_RANKS, parts
#define LK_HEAD_RANKS_SCHEMA LK_RANKS_SCHEMA ", int parts"
Tensor cross_entropy(const Tensor &logits, const Tensor &target, const Maybe &class_weight, LK_LOSS_PARAMETERS,
                     const Maybe &grad_scale, bool inplace);
tuple<Tensor, Tensor> cross_entropy_with_grad(const Tensor &logits, const Tensor &target, const Maybe &class_weight,
                                              LK_LOSS_PARAMETERS, const Maybe &grad_scale,
                                              std::optional<at::ScalarType> dlogits_dtype);
tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> cross_entropy_stats(const Tensor &logits, const Tensor &target,
                                                                          const Maybe &class_weight, LK_LOSS_PARAMETERS,
                                                                          bool statistics);
tuple<Tensor, Tensor, Tensor> cross_entropy_ids(const Tensor &logits, const Tensor &target_ids, const Maybe &target_weight,
                                                const Maybe &tail_weight, LK_LOSS_PARAMETERS, bool want_tail);
Tensor linear_cross_entropy(const Tensor &x, const Tensor &weight, const Tensor &target, const Maybe &bias,
                            const Maybe &class_weight, LK_LOSS_PARAMETERS, int64_t workspace_mib, bool fast_logits,
                            int64_t max_counted, bool batch_invariant, bool keep, const Maybe &grad_scale);
tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
linear_cross_entropy_stats(const Tensor &x, const Tensor &weight, const Tensor &target, const Maybe &bias,
                           const Maybe &class_weight, LK_LOSS_PARAMETERS, int64_t workspace_mib, bool fast_logits,
                           int64_t max_counted, bool batch_invariant, bool statistics);
tuple<Tensor, Tensor, Tensor> linear_cross_entropy_ids(const Tensor &x, const Tensor &weight, const Tensor &target_ids,
                                                       const Maybe &target_weight, const Maybe &tail_weight, const Maybe &bias,
                                                       LK_LOSS_PARAMETERS, int64_t workspace_mib, bool fast_logits,
                                                       int64_t max_counted, bool want_tail);
tuple<Tensor, Tensor> linear_kl(const Tensor &x, const Tensor &weight, const Tensor &teacher_input, const Tensor &teacher_weight,
                                const Maybe &bias, const Maybe &teacher_bias, const Maybe &row_weight, int64_t reduction,
                                int64_t divergence, double beta, double logit_scale, double teacher_scale, double softcap,
                                double teacher_softcap, int64_t workspace_mib, bool fast_logits, int64_t max_counted,
                                const Maybe &grad_scale, bool want_entropy);
tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_support(const Tensor &x, const Maybe &weight, const Tensor &ids,
                                                             const Tensor &offsets, const Maybe &target, const Maybe &bias,
                                                             const Maybe &teacher_logp, double softcap, double logit_scale,
                                                             int64_t ignore_index, std::string group, int64_t vocab_start,
                                                             int64_t vocab_total, int64_t parts);
tuple<Tensor, Tensor, Tensor, Tensor> linear_topk(const Tensor &x, const Tensor &weight, const Maybe &bias, const Maybe &seed,
                                                  const Maybe &offset, int64_t k, double softcap, double logit_scale,
                                                  int64_t vocab_start, int64_t workspace_mib);
Tensor md_lrpe_cosine(const Tensor &x, const Tensor &theta, c10::SymIntArrayRef shape, c10::SymInt prefix,
                      c10::SymIntArrayRef offset, const Maybe &offset_device, int64_t activation);

// As Python has it: float64, not Double.
inline std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

// CUDA's last error, which a positive status leaves set, would be raised again by the next op of PyTorch's.
inline void clear_cuda_error(lk_status status)
{
#ifndef LK_TORCH_CPU
    if (status > 0 || status == LK_ERR_DEVICE) (void)cudaGetLastError();
#endif
    (void)status;
}

// LK_RUN(name, x, arguments): lk's function of x's type. A refused call is a ValueError with lk's sentence; what the device or
// cuBLASLt answers is a RuntimeError.
#define LK_RUN(name, x, ...)                                                                                                   \
    do {                                                                                                                       \
        const at::ScalarType type_ = (x).scalar_type();                                                                        \
        const lk_status status_ = type_ == at::kBFloat16 ? name##_bf16(__VA_ARGS__)                                            \
                                  : type_ == at::kHalf   ? name##_f16(__VA_ARGS__)                                             \
                                                         : name##_f32(__VA_ARGS__);                                            \
        clear_cuda_error(status_);                                                                                             \
        TORCH_CHECK_VALUE(status_ >= 0 || status_ <= LK_ERR_CUBLAS, lk_last_error(), " (", lk_status_string(status_), ")");    \
        TORCH_CHECK(status_ == LK_OK, lk_last_error(), " (", lk_status_string(status_), ")");                                  \
    } while (0)
#define LK_DECLARE_ALL(OP) LK_DECLARE_##OP(f32) LK_DECLARE_##OP(f16) LK_DECLARE_##OP(bf16)

// The dispatcher's op lk::name, looked up once. An int or int[] that may be symbolic has another type there: LK_OP_AS.
#define LK_OP_AS(name, ...)                                                                                                    \
    static const auto name##_op =                                                                                              \
        c10::Dispatcher::singleton().findSchemaOrThrow((std::string(ops_namespace) + "::" #name).c_str(), "").typed<__VA_ARGS__>()
#define LK_OP(name) LK_OP_AS(name, decltype(name))

inline bool has(const Maybe &t) { return t && t->defined(); }
inline Maybe maybe(const Tensor &t) { return t.defined() ? Maybe(t) : Maybe(); }
inline Maybe packed(const Maybe &t) { return has(t) ? Maybe(t->contiguous()) : t; }

// Type and device of an op's first tensor; the others must be beside it, which check_devices sees to.
inline void check_input(const Tensor &x, const char *name)
{
    const at::ScalarType t = x.scalar_type();
    TORCH_CHECK_TYPE(t == at::kBFloat16 || t == at::kHalf || t == at::kFloat, "lk: ", name,
                     " must be float32, float16 or bfloat16, not ", dtype_name(t));
    TORCH_CHECK_VALUE(x.device().type() == LK_DEVICE_TYPE || x.is_meta(), "lk: ", name, " is on ", x.device().str(),
                      "; this build of lk_torch computes on " LK_DEVICE_NAME);
}
// The name that functional.py has for an argument of an op.
inline std::string public_name(const std::string &op, const std::string &name)
{
    const bool head = op.rfind("linear_", 0) == 0;
    if (name == "x" || name == "logits") return "input";
    if (name == "class_weight") return "weight";
    if (name == "offset_device") return "offset";
    return head && (name == "weight" || name == "bias") ? "linear_" + name : name;
}
// All tensors among an op's arguments are on the first one's device, empty ones too. Returns the first one.
template <class... A> const Tensor &check_devices(const std::string &op, const A &...arguments)
{
    const Tensor *first = nullptr;
    size_t i = 0;
    const auto check = [&](const auto &a) {
        const Tensor *t = nullptr;
        if constexpr (std::is_same_v<std::decay_t<decltype(a)>, Tensor>) t = &a;
        if constexpr (std::is_same_v<std::decay_t<decltype(a)>, Maybe>) t = a ? &*a : nullptr;
        if (t && t->defined()) {
            if (!first) first = t;
            TORCH_CHECK_VALUE(t->device() == first->device(), "lk: ",
                              public_name(op, c10::Dispatcher::singleton()
                                                  .findSchemaOrThrow((std::string(ops_namespace) + "::" + op).c_str(), "")
                                                  .schema().arguments()[i].name()),
                              " is on ", t->device().str(), ", but ", first->device().str(), " is needed");
        }
        i++;
    };
    (check(arguments), ...);
    return *first;
}
// LK_DTYPE_T or LK_DTYPE_F32: what lk takes for tensors beside x.
inline int type_beside(const Tensor &t, at::ScalarType x, const char *name)
{
    if (t.scalar_type() == x) return LK_DTYPE_T;
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, "lk: ", name, " must be ", dtype_name(x), x == at::kFloat ? "" : " or float32",
                     ", not ", dtype_name(t.scalar_type()));
    return LK_DTYPE_F32;
}
// A head's weight in the type of x, a copy where it is float32 beside x of 16 bits; its gradient is float32 then.
inline Tensor weight_beside(const Tensor &weight, const Tensor &x, const char *name, int *dweight_dtype)
{
    *dweight_dtype = type_beside(weight, x.scalar_type(), name);
    return *dweight_dtype == LK_DTYPE_T ? weight : weight.to(x.scalar_type());
}

// The device and the current stream of a tensor.
struct Stream {
#ifdef LK_TORCH_CPU
    explicit Stream(const Tensor &) {}
    operator cudaStream_t() const { return nullptr; }
#else
    explicit Stream(const Tensor &x) : guard(x.device()), stream(c10::cuda::getCurrentCUDAStream(x.get_device()).stream()) {}
    operator cudaStream_t() const { return stream; }
    c10::cuda::CUDAGuard guard;
    cudaStream_t stream;
#endif
};

// A workspace, from PyTorch's allocator. It is given back when the call returns; the stream orders who uses it next.
struct Workspace {
    explicit Workspace(size_t bytes)
    {
        if (!bytes) return;
#ifdef LK_TORCH_CPU
        data = c10::GetAllocator(at::kCPU)->allocate(bytes + LK_WORKSPACE_ALIGNMENT);
#else
        data = c10::cuda::CUDACachingAllocator::get()->allocate(bytes + LK_WORKSPACE_ALIGNMENT);
#endif
        const uintptr_t a = LK_WORKSPACE_ALIGNMENT;
        start = (void *)(((uintptr_t)data.get() + a - 1) / a * a);
    }
    c10::DataPtr data;
    void *start = nullptr;
};

// A budget of 0 is lk's own. least: that of the call, and of its backward where forward knows that it will come.
inline void check_budget(size_t budget, size_t least)
{
    TORCH_CHECK_VALUE(!budget || budget >= least, "lk: workspace_mib is ", budget >> 20, "; this call and its backward need at least ",
                      (least + ((size_t)1 << 20) - 1) >> 20);
}

// A context of lk's for each device, made by the first call. One call at a time may use it, so its lock is held until all is
// launched. It is never destroyed: at exit CUDA may be gone before it.
template <class Context> struct Locked {
    struct Shared {
        std::mutex mutex;
        bool made = false;
        Context context;
    };
    Locked(const Tensor &x, lk_status (*init)(Context *))
    {
        static auto &contexts = *new std::map<int, Shared>;
        static std::mutex finding;
        finding.lock();
        Shared &c = contexts[x.device().index()];
        finding.unlock();
        lock = std::unique_lock<std::mutex>(c.mutex);
        if (!c.made) TORCH_CHECK(init(&c.context) == LK_OK, lk_last_error());
        c.made = true, context = &c.context;
    }
    std::unique_lock<std::mutex> lock;
    Context *context;
};

inline Tensor make(at::IntArrayRef sizes, const Tensor &like, at::ScalarType type)
{
#ifdef LK_TORCH_CPU
    return at::detail::empty_cpu(sizes, type);
#else
    return at::detail::empty_cuda(sizes, type, like.device(), std::nullopt);
#endif
}
inline Tensor make(at::IntArrayRef sizes, const Tensor &like) { return make(sizes, like, like.scalar_type()); }

// Whether there is one stride between the rows of the last dimension: the leading dimensions can be seen as one. 0 of a single row.
inline bool row_stride(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t *stride)
{
    const int64_t cols = sizes.back();
    int64_t packed = 0; // the stride that the next dimension must have
    bool fits = strides.back() == 1 || cols == 1;
    *stride = 0;
    for (int64_t i = (int64_t)sizes.size() - 2; i >= 0 && fits; i--) {
        if (sizes[i] == 1) continue;
        fits = packed ? strides[i] == packed : strides[i] >= cols && strides[i] > 0;
        if (!packed) *stride = strides[i];
        packed = strides[i] * sizes[i];
    }
    return fits;
}

// A tensor as rows of its last dimension. lk takes one stride between rows, and 0 means packed. So an expanded tensor is
// copied, and so is one whose leading dimensions cannot be seen as one.
struct Rows {
    Tensor t;
    int64_t rows = 1, cols, stride = 0;
    explicit Rows(const Tensor &x, const char *name) : t(x)
    {
        TORCH_CHECK_VALUE(x.dim() >= 1, "lk: ", name, " needs at least one dimension");
        cols = x.size(-1);
        for (int64_t i = 0; i < x.dim() - 1; i++) rows *= x.size(i);
        if (!x.is_contiguous() && !row_stride(x.sizes(), x.strides(), &stride)) t = x.contiguous(), stride = 0;
    }
    const void *data() const { return t.const_data_ptr(); }
    int64_t distance() const { return stride ? stride : cols; }
    int64_t vec() const { return 16 / (int64_t)t.element_size(); } // elements of 16 bytes
    // How far the first row, or each row after the one before it, is off where packed rows would have it, modulo 16 bytes, in
    // elements. The first is read from the tensor and not from the address, as fake tensors have none: _fake.py says the same.
    int64_t offset() const { return t.storage_offset() % vec(); }
    int64_t pad() const { return (distance() - cols) % vec(); }
    // Whether each row has the address of a packed one, modulo 16 bytes.
    bool lies_as_packed() const { return (uintptr_t)data() % 16 == 0 && pad() == 0; }
    // Whether each row lies on 16 bytes, which can be where one has whole vectors.
    bool lies_on_16() const { return (uintptr_t)data() % 16 == 0 && distance() % vec() == 0; }
    void pack() { t = t.clone(at::MemoryFormat::Contiguous), stride = 0; }
};

// Whether a tensor that a kernel would read element by element is large enough for a copy of it, which it reads by vectors. The
// launch of a copy takes 2 us. On an H200 rms_norm and its gradients take 4.0 ms element by element and 0.22 ms by vectors, for
// 8192 x 8192 in bf16, so 128 MiB: 128 KiB are 4 us, as much as a copy in forward and another one in backward. So the
// limit is computed; no call was timed on either side of it.
inline bool worth_a_copy(const Tensor &t) { return t.numel() * (int64_t)t.element_size() >= (int64_t)128 << 10; }

// The rows of a head's input. Matmuls are fastest where they lie on 16 bytes. linear_weight is read as it is: a copy of it would
// often take more memory than all else of a call.
inline Rows head_rows(const Tensor &x, const char *name)
{
    Rows rows(x, name);
    if (!rows.lies_on_16() && rows.cols % rows.vec() == 0 && worth_a_copy(rows.t)) rows.pack();
    return rows;
}

// A tensor whose rows are `distance` elements apart, the first one `offset` elements behind a multiple of 16 bytes.
inline Tensor make_rows(at::IntArrayRef sizes, const Tensor &like, at::ScalarType type, int64_t offset, int64_t distance)
{
    std::vector<int64_t> strides(sizes.size(), 1);
    int64_t step = distance, end = sizes.back(); // end: of the last row
    for (int64_t i = (int64_t)sizes.size() - 2; i >= 0; i--) strides[i] = step, end += (sizes[i] - 1) * step, step *= sizes[i];
    Tensor made = make({offset + end}, like, type);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    made.unsafeGetTensorImpl()->set_storage_offset(offset);
    return made;
}

// The gradient of x, and the distance of its rows. Kernels write vectors of 16 bytes where each row has the address of x's row
// modulo 16 bytes, in elements where the types differ; else element by element, and on an H200 a call takes 3 to 4 times as long.
// So where packed rows would not have it, the rows are up to a vector apart. Short rows, which that would make longer by more
// than an eighth, are packed all the same.
inline Tensor make_gradient(const Rows &x, at::ScalarType type, int64_t *stride)
{
    const int64_t offset = x.offset(), pad = x.pad();
    *stride = 0;
    if (!x.t.numel() || (!offset && !pad) || 8 * pad > x.cols) return make(x.t.sizes(), x.t, type);
    *stride = x.cols + pad;
    return make_rows(x.t.sizes(), x.t, type, offset, *stride);
}
inline Tensor make_gradient(const Rows &x, int64_t *stride) { return make_gradient(x, x.t.scalar_type(), stride); }

// A factor of each row's loss. r keeps the memory of a copy.
template <class Args> void fill_row_weight(Args &a, const Tensor &x, const Maybe &row_weight, Tensor *r)
{
    if (!has(row_weight)) return;
    const at::IntArrayRef rows = x.sizes().slice(0, x.dim() - 1);
    TORCH_CHECK_VALUE(row_weight->sizes() == rows, "lk: row_weight has shape ", row_weight->sizes(), "; it must be ", rows);
    TORCH_CHECK_TYPE(row_weight->is_floating_point() || row_weight->scalar_type() == at::kBool,
                     "lk: row_weight must have a floating type or be a mask of bool, not ",
                     dtype_name(row_weight->scalar_type()));
    *r = row_weight->to(at::kFloat).contiguous();
    a.row_weight = r->const_data_ptr<float>();
}

// Whether targets are probabilities of classes; the sizes of their rows.
inline bool probable(const Tensor &target) { return target.is_floating_point(); }
inline at::IntArrayRef target_sizes(const Tensor &target)
{
    return probable(target) ? target.sizes().slice(0, target.dim() - 1) : target.sizes();
}
// What cross_entropy and linear_cross_entropy share of their arguments: the target, and the rest. t, w, d and r keep the memory
// of copies.
template <class Args> void fill_target(Args &a, const Tensor &x, const Tensor &target, Tensor *t)
{
    TORCH_CHECK_VALUE(target.dim() == x.dim() - 1 && target.sizes() == x.sizes().slice(0, x.dim() - 1), "lk: target has shape ",
                      target.sizes(), "; an input of ", x.sizes(), " needs ", x.sizes().slice(0, x.dim() - 1));
    const at::ScalarType type = target.scalar_type();
    TORCH_CHECK_TYPE(type == at::kLong || type == at::kInt || type == at::kByte,
                     "lk: target must be int64, int32 or uint8 numbers of classes, not ", dtype_name(type));
    *t = type == at::kByte ? target.to(at::kInt, false, false, at::MemoryFormat::Contiguous) : target.contiguous();
    a.target = t->const_data_ptr(), a.target_dtype = type == at::kLong ? LK_TARGET_INT64 : LK_TARGET_INT32;
}
// The same for several ids per row; returns how many.
template <class Args>
int64_t fill_ids(Args &a, const Tensor &x, const Tensor &target_ids, const Maybe &target_weight, Tensor *ids, Tensor *weight)
{
    const int64_t last = x.dim() - 1;
    TORCH_CHECK_VALUE(target_ids.dim() == x.dim() && target_ids.sizes().slice(0, last) == x.sizes().slice(0, last),
                      "lk: target_ids has shape ", target_ids.sizes(), "; an input of ", x.sizes(), " needs ",
                      x.sizes().slice(0, last), " and the number of ids");
    TORCH_CHECK_TYPE(target_ids.scalar_type() == at::kLong || target_ids.scalar_type() == at::kInt,
                     "lk: target_ids must be int64 or int32 numbers of classes, not ", dtype_name(target_ids.scalar_type()));
    *ids = target_ids.contiguous();
    a.target_dtype = target_ids.scalar_type() == at::kInt ? LK_TARGET_INT32 : LK_TARGET_INT64;
    if (has(target_weight)) {
        TORCH_CHECK_VALUE(target_weight->sizes() == target_ids.sizes(), "lk: target_weight has shape ", target_weight->sizes(),
                          "; it must be ", target_ids.sizes());
        TORCH_CHECK_TYPE(target_weight->is_floating_point(), "lk: target_weight must have a floating type, not ",
                         dtype_name(target_weight->scalar_type()));
        *weight = target_weight->to(at::kFloat).contiguous();
    }
    return target_ids.size(-1);
}
// A collective of PyTorch's dispatcher: the headers of c10d are not in every build. A group is a string in some versions of
// PyTorch, and a value of any type in others. So it is called with values that carry their type. A result is there after wait.
template <class... Args> Tensor collective(const char *name, const Args &...args)
{
    torch::jit::Stack stack{args...};
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
    return std::move(stack[0]).toTensor();
}
inline void wait(const Tensor &t) { collective("_c10d_functional::wait_tensor", t); }

// parallel.reduce of a head's call: lk hands over dx once, before dweight.
template <class Call> lk_status sum_dx(void *user, void *, int64_t, cudaStream_t)
{
    Call &c = *(Call *)user;
    if (!c.group.empty()) collective("_c10d_functional::all_reduce_", c.dx, "sum", c.group);
    return LK_OK;
}

// What functional.set_batch_invariant has set, for forward calls of rows.
inline std::atomic<bool> &batch_invariant_rows()
{
    static std::atomic<bool> on{false};
    return on;
}

// A head's input. parts: 1, or the number of ranks, which then have one part of the tokens each, equal ones along the first dimension.
// `all` is memory for all tokens before any are there, so that lk can refuse a call before its first collective.
struct HeadInput {
    Tensor mine, all, unsummed;
    int64_t parts;
    std::string group;
    bool complete;
    HeadInput(const Tensor &x, int64_t parts, const std::string &group, const char *name = "input")
        : mine(x), all(x), parts(parts), group(group), complete(parts == 1)
    {
        if (complete) return;
        TORCH_CHECK_VALUE(x.dim() >= 2, "lk: ", name, " has shape ", x.sizes(), "; with sequence_parallel it needs two dimensions");
        std::vector<int64_t> sizes = x.sizes().vec();
        sizes[0] *= parts;
        all = make(sizes, x);
    }
    void gather() // each rank calls it in forward and in backward, whatever it computes there
    {
        if (!complete && all.numel())
            wait(collective("_c10d_functional::all_gather_into_tensor_out", mine.contiguous(), parts, group, all));
        complete = true;
    }
    // dx of mine, summed over the ranks; dx of all is kept until that is there.
    Tensor sum(const Tensor &dx)
    {
        unsummed = dx;
        return dx.numel() ? collective("_c10d_functional::reduce_scatter_tensor", dx, "sum", parts, group) : make(mine.sizes(), dx);
    }
};
template <class Call> lk_status scatter_dx(void *user, void *, int64_t, cudaStream_t) // sum_dx, where the input is in parts
{
    Call &c = *(Call *)user;
    c.dx = c.input.sum(c.dx);
    return LK_OK;
}

// This rank's classes. It must have as many as its slices; `what` and `unit` are for the sentence that says so.
template <class Args> void fill_slice(Args &a, int64_t has, const char *what, const char *unit, LK_SHARDS_PARAMETERS)
{
    const int64_t all = (int64_t)shards.size(), first = rank * slices;
    int64_t mine = 0;
    const bool fits = slices > 0 && all % slices == 0 && rank >= 0 && first < all;
    for (int64_t i = 0; i < all && fits; i++) {
        if (i < first) a.parallel.vocab_start += shards[i];
        else if (i < first + slices) mine += shards[i];
        a.parallel.vocab_total += shards[i];
    }
    TORCH_CHECK_VALUE(fits && mine == has, "lk: ", what, " has ", has, unit, " on rank ", rank, ", but shards is ", shards);
    a.parallel.rank = (int)rank, a.parallel.ranks = (int)(all / slices);
}
// A step of this rank that writes states: run() for each of its slices, as a rank would that has no other classes. So the states of
// a slice have the same bits on whichever rank it is. take(first, count) gives the call these of this rank's classes. Afterwards the
// call has all of them again, and finish merges the states of all slices.
template <class Args, class Take, class Run>
void run_slices(Args &a, LK_SHARDS_PARAMETERS, const Tensor &states, const Take &take, const Run &run)
{
    const int64_t start = a.parallel.vocab_start, bytes = (int64_t)states.nbytes() / slices;
    int64_t first = 0;
    a.parallel.ranks = (int)shards.size();
    for (int64_t i = 0; i < slices; i++) {
        const int64_t slice = rank * slices + i;
        a.parallel.rank = (int)slice, a.parallel.vocab_start = start + first;
        a.states = (char *)states.mutable_data_ptr() + i * bytes;
        take(first, shards[slice]);
        run();
        first += shards[slice];
    }
    take(0, first);
    a.parallel.vocab_start = start;
}
// The states of all slices, in order.
inline Tensor gather_states(const Tensor &states, LK_RANKS_PARAMETERS)
{
    if (group.empty() || !states.size(0)) return states;
    const Tensor all = collective("_c10d_functional::all_gather_into_tensor", states, (int64_t)shards.size() / slices, group);
    wait(all);
    return all;
}
// The address of element `at`.
inline const void *element(const Tensor &t, const void *data, int64_t at)
{
    return data ? (const char *)data + at * (int64_t)t.element_size() : nullptr;
}
// The weights of the rows' tails, NULL without any.
inline const float *fill_tail(const Tensor &x, const Maybe &tail_weight, Tensor *weight)
{
    if (!has(tail_weight)) return nullptr;
    TORCH_CHECK_VALUE(tail_weight->sizes() == x.sizes().slice(0, x.dim() - 1), "lk: tail_weight has shape ", tail_weight->sizes(),
                      "; an input of ", x.sizes(), " needs ", x.sizes().slice(0, x.dim() - 1));
    TORCH_CHECK_TYPE(tail_weight->is_floating_point(), "lk: tail_weight must have a floating type, not ",
                     dtype_name(tail_weight->scalar_type()));
    *weight = tail_weight->to(at::kFloat).contiguous();
    return weight->const_data_ptr<float>();
}
// The rows' tails, which a call writes to *tail; undefined where they are not wanted.
inline Tensor make_tail(const Tensor &x, bool wanted, float **tail)
{
    if (!wanted) return {};
    Tensor made = make(x.sizes().slice(0, x.dim() - 1), x, at::kFloat);
    *tail = made.mutable_data_ptr<float>();
    return made;
}
template <class Args>
void fill_loss(Args &a, const Tensor &x, const Maybe &weight, int64_t vocab, Tensor *w, Tensor *d, Tensor *r, LK_LOSS_PARAMETERS)
{
    TORCH_CHECK_VALUE((float)logit_scale != 0, "lk: logit_scale is 0; it must be above 0");
    if (has(weight)) {
        TORCH_CHECK_VALUE(weight->dim() == 1 && weight->size(0) == vocab, "lk: weight has shape ", weight->sizes(),
                          "; one number for each of ", vocab, " classes is needed");
        TORCH_CHECK_TYPE(weight->is_floating_point(), "lk: weight must have a floating type, not ",
                         dtype_name(weight->scalar_type()));
        *w = weight->to(at::kFloat).contiguous();
        a.class_weight = w->const_data_ptr<float>();
    }
    if (has(denominator)) {
        TORCH_CHECK_VALUE(reduction == LK_REDUCTION_MEAN, "lk: denominator is what a mean divides by; reduction must be mean");
        TORCH_CHECK_VALUE(denominator->numel() == 1, "lk: denominator has shape ", denominator->sizes(),
                          "; it must be one number");
        TORCH_CHECK_TYPE(!denominator->is_complex(), "lk: denominator must be a real number");
        *d = denominator->to(at::kFloat);
        a.denominator = d->const_data_ptr<float>();
    }
    fill_row_weight(a, x, row_weight, r);
    a.reduction = (int)reduction, a.use_ignore_index = 1, a.ignore_index = ignore_index;
    a.label_smoothing = (float)label_smoothing, a.z_loss = (float)z_loss, a.softcap = (float)softcap;
    a.logit_scale = (float)logit_scale, a.zero_when_empty = zero_when_empty;
}

// What the _stats functions give of rows besides. With statistics lk writes them and the entropy into one tensor, and each gets
// memory of its own: an op's results do not share it.
struct Statistics {
    Tensor entropy, argmax, statistics; // [rows], twice; [3, rows] or undefined
    Tensor all;
    template <class Args> void want(Args &a, bool statistics, at::IntArrayRef rows, const Tensor &x)
    {
        make_outputs(statistics, rows, x);
        a.entropy = entropy.mutable_data_ptr<float>(), a.argmax = argmax.mutable_data_ptr<int64_t>(), a.statistics = statistics;
    }
    void split(); // after lk's call

  private:
    void make_outputs(bool statistics, at::IntArrayRef rows, const Tensor &x);
};

// Not plain memory of a device: being traced by torch.compile, under a dispatch mode, a functorch transform, meta.
inline bool traced(const Tensor &x) { return at::isTensorSubclassLike(x); }
inline bool traced(const Maybe &x) { return has(x) && traced(*x); }

template <class... Tensors> bool wants_gradient(const Tensors &...tensors)
{
    TORCH_CHECK_NOT_IMPLEMENTED(!(torch::autograd::isFwGradDefined(tensors) || ...),
                                "lk: forward-mode gradients are not supported; use backward");
    return torch::autograd::compute_requires_grad(tensors...) &&
           !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}
// What a loss has no gradient for.
inline void check_constants(const Tensor &target, const Maybe &class_weight, const Maybe &denominator, const Maybe &row_weight)
{
    const std::pair<const char *, Maybe> constants[] = {
        {"target", target}, {"weight", class_weight}, {"denominator", denominator}, {"row_weight", row_weight}};
    for (const auto &[name, t] : constants)
        TORCH_CHECK_VALUE(!wants_gradient(t), "lk: ", name, " requires a gradient, and gets none; detach it");
}
// All that differs between the versions of PyTorch: how a node is held (from 2.13 on by an intrusive pointer), and who tells the
// hooks of torch.autograd.graph.node_creation_hook of a node (from 2.14 on its maker). A header that is there says it, so a
// build from between two versions is right, too.
#if __has_include(<torch/csrc/autograd/node.h>)
template <class N> using Held = c10::intrusive_ptr<N>;
template <class N, class... Args> Held<N> new_node(Args &&...args)
{
    return c10::make_intrusive<N>(std::forward<Args>(args)...);
}
inline Held<Node> held(Node *node) { return node->getptr(); }
#else
template <class N> using Held = std::shared_ptr<N>;
template <class N, class... Args> Held<N> new_node(Args &&...args)
{
    return Held<N>(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
inline Held<Node> held(Node *node) { return node->shared_from_this(); }
#endif
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
inline void node_is_made(const Held<Node> &node) { torch::autograd::fire_node_creation_hooks(node); }
#else
inline void node_is_made(const Held<Node> &) {}
#endif

// An op makes its node, then sets the history of its outputs, then saves what backward needs, and last calls node_is_made.
template <class N, class... Tensors> Held<N> make_node(const Tensors &...inputs)
{
    Held<N> node = new_node<N>();
    node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
    return node;
}
// A node unpacks all that it has saved before a Below: a checkpoint may compute it again then, and must record what it saves.
// PyTorch saves no tensor of torch.inference_mode(), as those of a teacher, since it counts no writes to one. A tensor of the same
// memory is saved instead; nothing notices a write to it.
inline SavedVariable save(const Tensor &t)
{
    if (!t.defined() || !t.is_inference() || traced(t)) return SavedVariable(t, false);
    return SavedVariable(at::empty({0}, t.options()).set_(t.storage(), t.storage_offset(), t.sizes(), t.strides()), false);
}
inline SavedVariable save(const Maybe &t) { return save(t.value_or(Tensor())); }
// The same, packed and at a multiple of 16 bytes: a hook of saved tensors, or vmap, may give a view that lies elsewhere.
inline Tensor aligned(const Tensor &saved)
{
    const Tensor t = saved.contiguous();
    return (uintptr_t)t.const_data_ptr() % 16 ? t.clone() : t;
}

// The gradients that a node returns, those that are wanted. With create_graph they would count as constants in the second
// derivative, which lk does not have. So differentiating them raises: what they are given is an error on the way to all that they
// depend on, the node's inputs and `upstream`.
variable_list once(Node &node, const variable_list &upstream, variable_list gradients, const char *op);

// The upstream gradient that forward takes for a reduced loss, whose gradients it computes: grad_scale, else what backward got
// last time, where that may be used, else 1.
struct Expected {
    Tensor upstream; // float32, one number on the device; undefined: 1
    Tensor history;  // lk_rescale's, to be told what backward got; undefined: it is not told
};
enum class Reduced { CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_KL }; // whose histories are apart
Expected expected_upstream(const Tensor &x, const Maybe &grad_scale, Reduced loss);

// The node of a reduced loss whose gradients were computed in forward, for the upstream gradient `made_for`.
struct LossBackward : Node {
    std::vector<SavedVariable> gradients;
    SavedVariable made_for;
    Tensor history;
    bool overwrites = false; // the gradient lies in the logits' memory, whoever else holds that
    variable_list apply(variable_list &&upstream) override;
    void release_variables() override
    {
        for (SavedVariable &g : gradients) g.reset_data();
        made_for.reset_data();
    }
    void keep(const variable_list &made, const Expected &e)
    {
        for (const Tensor &g : made) gradients.push_back(save(next_edge(gradients.size()).is_valid() ? g : Tensor()));
        made_for = save(e.upstream), history = e.history;
    }
};

// What a file registers when it is loaded: TORCH_LIBRARY_FRAGMENT, whose namespace is written in the file.
#define LK_OPS(m)                                                                                                              \
    static void register_ops(torch::Library &);                                                                                \
    static const torch::detail::TorchLibraryInit ops(torch::Library::FRAGMENT, &register_ops, ops_namespace, std::nullopt,     \
                                                     __FILE__, __LINE__);                                                      \
    static void register_ops(torch::Library &m)

// An op that a user calls, and a kernel: schema and dispatch. Autograd through a kernel itself raises. A kernel's wrapper checks
// devices, and gives a tensor without elements, in float32, for each that was not asked for: AOTInductor takes no undefined one.
template <class F> void user_op(torch::Library &m, const std::string &name, const char *schema, F *f)
{
    m.def((name + schema).c_str());
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, f));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, f));
}
inline void fill_in(Tensor &, const Tensor &) {}
template <class... T> void fill_in(tuple<T...> &out, const Tensor &beside)
{
    const auto nothing = [&](Tensor &t) {
        if (t.defined()) return;
        c10::Storage none(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, beside.device()));
        t = at::detail::make_tensor<c10::TensorImpl>(std::move(none), c10::DispatchKeySet(c10::DispatchKey::LK_DEVICE),
                                                     caffe2::TypeMeta::Make<float>());
    };
    std::apply([&](T &...t) { (nothing(t), ...); }, out);
}
template <class R, class... A> void kernel(torch::Library &m, const std::string &name, const char *schema, R (*f)(A...))
{
    m.def((name + schema).c_str());
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::LK_DEVICE, [f, name](A... arguments) -> R {
        const Tensor &beside = check_devices(name, arguments...);
        R out = f(arguments...);
        fill_in(out, beside);
        return out;
    }));
    m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
}

} // namespace lk_torch
