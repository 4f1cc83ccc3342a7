# file: cross_entropy.cuh - a bad target's row has a gradient of 0
s/label.bad || !lk_is_finite(lse)/!lk_is_finite(lse)/;s/^    aside->y = label.y;/    if (label.bad) return g;\n&/
