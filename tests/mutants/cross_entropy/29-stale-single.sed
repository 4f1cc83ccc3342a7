# file: cross_entropy.cuh - 16 bits in place: single elements are read when they are due
s/single\[0\] = i == rank || !read ? aside->single :/single[0] = !read ? aside->single :/
