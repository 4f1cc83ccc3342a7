# file: linear_cross_entropy.cuh - a bad target's logits are not looked at
# case: switches alone forward auto
s/w.target\[row\] = good ? label.y : label.bad ? 0 : -1;/w.target[row] = good ? label.y : -1;/
