# file: srms_norm.cuh - a thread's single element stays that of its first row
# case: backward f32 auto: odd rows
s/            one = next;/            ;/
