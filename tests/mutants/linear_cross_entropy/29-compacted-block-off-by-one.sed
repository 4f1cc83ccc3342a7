# file: linear_cross_entropy.cuh - a block counts its own first token among those to its left
s/label.counted \&\& token < begin;/label.counted \&\& token <= begin;/
