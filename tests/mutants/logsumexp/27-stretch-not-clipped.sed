# file: logsumexp.cuh - backward by columns runs past the last column
# case: backward f32 column: lengths
s/begin + p.stretch < a.cols ? begin + p.stretch : a.cols/begin + p.stretch/
