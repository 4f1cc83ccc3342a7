# file: linear_cross_entropy.cuh - rows that no token needs keep what the workspace held
s/p.c.compact \&\& row < p.c.rows; row += step) {.*/false; row += step) {/
