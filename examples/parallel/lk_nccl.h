// SPDX-License-Identifier: MIT
/* lk_nccl.h - the two functions of lk_vocab_parallel, by NCCL. Copy it into your project, and include it behind an op's header.
 *
 * all_gather runs on the caller's stream. dx is summed on a stream of its own, beside what follows on the caller's, which is the
 * matmul of dweight. lk_nccl_join makes the caller's stream wait for that sum; call it before dx is read.
 * NCCL 2.10 or later; a communicator's maxCTAs needs 2.17. Make a communicator for the head alone. */
#ifndef LK_NCCL_H
#define LK_NCCL_H

#include <cuda_runtime.h>
#include <nccl.h>

typedef struct {
    ncclComm_t comm;
    ncclDataType_t type;            /* of dx, ncclBfloat16 for example */
    size_t hidden;                  /* elements of a row of dx, which is packed */
    cudaStream_t stream;            /* of the sums */
    cudaEvent_t complete, summed;   /* dx of this rank; the sum over ranks */
} lk_nccl;

/* The communicator stays the caller's. */
static inline lk_status lk_nccl_init(lk_nccl *n, ncclComm_t comm, ncclDataType_t type, size_t hidden)
{
    int least, most;
    const lk_nccl none = {0};
    *n = none, n->comm = comm, n->type = type, n->hidden = hidden;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &most);
    if (!error) error = cudaStreamCreateWithPriority(&n->stream, cudaStreamNonBlocking, most); /* before the matmul's blocks */
    if (!error) error = cudaEventCreateWithFlags(&n->complete, cudaEventDisableTiming);
    if (!error) error = cudaEventCreateWithFlags(&n->summed, cudaEventDisableTiming);
    return (lk_status)error;
}

static inline void lk_nccl_destroy(lk_nccl *n)
{
    cudaEventDestroy(n->summed), cudaEventDestroy(n->complete), cudaStreamDestroy(n->stream);
}

static inline lk_status lk_nccl_all_gather(void *user, const void *send, void *receive, size_t bytes, cudaStream_t stream)
{
    lk_nccl *const n = (lk_nccl *)user;
    return ncclAllGather(send, receive, bytes, ncclInt8, n->comm, stream) ? (lk_status)cudaErrorUnknown : LK_OK;
}

static inline lk_status lk_nccl_reduce(void *user, void *dx, int64_t tokens, cudaStream_t stream)
{
    lk_nccl *const n = (lk_nccl *)user;
    cudaError_t error = cudaEventRecord(n->complete, stream);
    if (!error) error = cudaStreamWaitEvent(n->stream, n->complete, 0);
    if (error) return (lk_status)error;
    if (ncclAllReduce(dx, dx, (size_t)tokens * n->hidden, n->type, ncclSum, n->comm, n->stream)) return (lk_status)cudaErrorUnknown;
    return (lk_status)cudaEventRecord(n->summed, n->stream);
}

static inline lk_status lk_nccl_join(lk_nccl *n, cudaStream_t stream)
{
    return (lk_status)cudaStreamWaitEvent(stream, n->summed, 0);
}

#endif
