# file: srms_norm.cuh - the sums for dweight of vectors that no thread holds start from what is in the workspace
# case: backward f32 block: long rows
s/partial\[first + i \* N + j\] = 0\.0f;/;/
