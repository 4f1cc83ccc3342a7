# file: lk_scale.cuh - the elements behind the last vector are left out
# case: scale
s/i < split.edge/i < split.head/
