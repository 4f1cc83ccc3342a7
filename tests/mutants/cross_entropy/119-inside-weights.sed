# file: cross_entropy.cuh - counted inside: a mean with class weights is over the rows
s/device.arch >= 90 \&\& !a.class_weight \&\& a.rows/device.arch >= 90 \&\& a.rows/
