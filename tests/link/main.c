// SPDX-License-Identifier: MIT
/* One program of a C file, a C++ file and two .cu files, all of which include lk: it links, and lk_last_error is one symbol. */
#include <stdio.h>
#include <string.h>

#include "lk/logsumexp.cuh"

LK_DECLARE_LOGSUMEXP(f32)

int second_errors(void);
int host_errors(void);

static int failed, passed;
static void check(const char *name, int good)
{
    printf("%s  %s\n", good ? "ok  " : "FAIL", name);
    *(good ? &passed : &failed) += 1;
}

int main(void)
{
    lk_logsumexp_forward_args args = {.outer = 3, .cols = 5};
    check("no error before the first", lk_last_error()[0] == '\0');
    check("C calls the .cu file", lk_logsumexp_forward_f32(&args, NULL) == LK_ERR_NULL);
    check("C reads the .cu file's sentence", strcmp(lk_last_error(), "lk_logsumexp_forward_f32: x is NULL") == 0);
    check("C++ without CUDA too", host_errors());
    check("a static copy in a second .cu file", second_errors() == 8);
    check("its sentences are seen here", strcmp(lk_last_error(), "lk_logsumexp_backward_bf16: args is NULL") == 0);
    check("status names", strcmp(lk_status_string(LK_ERR_SHAPE), "LK_ERR_SHAPE") == 0 && lk_status_string(-999) != NULL);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
