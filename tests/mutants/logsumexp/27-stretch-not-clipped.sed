# file: logsumexp.cuh - backward by columns runs past the last column
s/begin + p.stretch < a.cols ? begin + p.stretch : a.cols/begin + p.stretch/
