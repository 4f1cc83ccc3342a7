# file: lk_base.cuh - all threads share a sentence
# case: each thread has its own sentence
s/static thread_local char text\[512\]/static char text[512]/
