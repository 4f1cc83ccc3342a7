# file: md_lrpe_cosine.cuh - a group takes angles that another has not put there yet
/all groups have put their angles there/d
