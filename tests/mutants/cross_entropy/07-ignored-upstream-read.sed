# file: cross_entropy.cuh - an ignored row is multiplied by its upstream
s/^    if (!label.counted) return g;/    if (!label.counted) { if (a.upstream) g.rise = 0.0f * a.upstream[a.upstream_per_row ? row : 0]; return g; }/
