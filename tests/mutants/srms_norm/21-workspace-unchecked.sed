# file: srms_norm.cuh - a workspace that is too small is accepted
# case: backward f32: errors
s/if (a->workspace_bytes < workspace)/if (false \&\& a->workspace_bytes < workspace)/
