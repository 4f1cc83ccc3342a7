# file: srms_norm.cuh - a row is read before what was copied of it is there
# case: backward f32: errors
/lk_cp_async_wait_group<STAGES - 1>();/d
