# file: linear_cross_entropy.cuh - the workspace by default is the smallest one
# case: workspaces by default
s/\*bytes = plan.workspace_bytes; /*bytes = plan.minimum_bytes; /
