# file: logsumexp.cuh - lanes without a row leave out the reduction of their warp
# case: forward f32: errors
s/^    const lk_lse s = lk_lse_read<false>(raw, share, p.a.scale/    lk_lse s = lk_lse_empty();\n    if (owner) s = lk_lse_read<false>(raw, share, p.a.scale/
