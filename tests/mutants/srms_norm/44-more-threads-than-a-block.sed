# file: srms_norm.cuh - many long rows ask for more threads than a block has
# case: forward f32 auto: long rows
s/device.sms) most = 1024;/device.sms) most = 2048;/
