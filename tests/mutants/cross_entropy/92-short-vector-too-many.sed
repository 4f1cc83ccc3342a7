# file: cross_entropy.cuh - short rows: every lane has as many vectors as the first
# case: backward f16: the target's gradient
s/ \/ N - rank + team - 1) >> team_log2/ \/ N + team - 1) >> team_log2/
