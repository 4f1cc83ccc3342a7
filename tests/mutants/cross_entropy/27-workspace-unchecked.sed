# file: cross_entropy.cuh - a workspace that is too small is accepted
# case: forward f32: errors
s/lk_check_workspace(op, a.workspace, a.workspace_bytes, bytes)/lk_check_workspace(op, a.workspace, a.workspace_bytes, bytes ? 1 : 0)/
