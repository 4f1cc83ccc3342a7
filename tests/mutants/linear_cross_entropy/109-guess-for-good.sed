# file: linear_cross_entropy.cuh - a tile far from the guess is taken against it all the same
# case: far apart forward_backward fused
s|off > 40.0f \|\| off < -90.0f ? max : guess|guess|
