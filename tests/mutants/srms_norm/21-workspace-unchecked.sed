# file: srms_norm.cuh - a workspace that is too small is accepted
# case: backward f32: errors
s/lk_check_workspace(op, a->workspace, a->workspace_bytes, workspace)/lk_check_workspace(op, a->workspace, workspace, workspace)/
