# SPDX-License-Identifier: MIT
"""lk's ops for Hugging Face's `kernels`: layers for its mapping, lk_torch's functions, the head in TRL's interface."""
from . import _C
from . import _fake, layers
from .functional import (CrossEntropyIdsOutput, CrossEntropyIdsTailOutput, CrossEntropyOutput, LinearCrossEntropyOutput, SupportOutput,
                         TopkOutput, add_rms_norm, cross_entropy, cross_entropy_ids, cross_entropy_stats, cross_entropy_with_grad, glu, kl,
                         linear_cross_entropy, linear_cross_entropy_ids, linear_cross_entropy_stats, linear_kl, linear_support,
                         linear_topk, logsumexp, md_lrpe_cosine, rms_norm, rope, srms_norm, support)
from .trl import (ChunkedDivergenceFunction, ChunkedLogProbFunction, chunked_divergence, chunked_log_probs,
                  selective_log_softmax_and_entropy)

BACKEND = _C.BACKEND
__all__ = ["BACKEND", "ChunkedDivergenceFunction", "ChunkedLogProbFunction", "CrossEntropyIdsOutput", "CrossEntropyIdsTailOutput",
           "CrossEntropyOutput", "LinearCrossEntropyOutput", "SupportOutput", "TopkOutput", "add_rms_norm", "chunked_divergence",
           "chunked_log_probs", "cross_entropy", "cross_entropy_ids", "cross_entropy_stats", "cross_entropy_with_grad", "glu", "kl", "layers", "linear_cross_entropy",
           "linear_cross_entropy_ids", "linear_cross_entropy_stats", "linear_kl", "linear_support", "linear_topk", "logsumexp",
           "md_lrpe_cosine", "rms_norm", "rope", "selective_log_softmax_and_entropy", "srms_norm", "support"]
