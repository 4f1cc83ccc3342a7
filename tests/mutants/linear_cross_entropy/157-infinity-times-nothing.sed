# file: linear_cross_entropy.cuh - a lane without a part in the tile's +inf multiplies its nothing by it
# case: infinite places forward_backward fused
s/{sum == 0.0f ? -INFINITY : from, sum}/{from, sum}/
