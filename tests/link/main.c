// SPDX-License-Identifier: MIT
/* One program of a C file, a C++ file and two .cu files, all of which include lk. The second .cu file includes another version
 * of lk, whose structs are different, with LK_API static. It links, both versions run, and each keeps its own last error. */
#include <stdio.h>
#include <string.h>

#include "lk/logsumexp.cuh"

LK_DECLARE_LOGSUMEXP(f32)

int first_runs(void);
int first_version(void);
int second_errors(void);
int second_runs(void);
int second_version(void);
const char *second_last_error(void);
int host_errors(void);

static int failed, passed;
static void check(const char *name, int good)
{
    printf("%s  %s\n", good ? "ok  " : "FAIL", name);
    *(good ? &passed : &failed) += 1;
}

int main(void)
{
    lk_logsumexp_args args = {.outer = 3, .cols = 5};
    check("no error before the first", lk_last_error()[0] == '\0');
    check("C calls the .cu file", lk_logsumexp_forward_f32(&args, NULL) == LK_ERR_NULL);
    check("C reads the .cu file's sentence", strcmp(lk_last_error(), "lk_logsumexp_forward_f32: x is NULL") == 0);
    check("C++ without CUDA too", host_errors());
    check("another version's static copy in a second .cu file", second_errors() == 8);
    check("it is another version", first_version() == LK_VERSION && lk_version() == LK_VERSION && second_version() == LK_VERSION + 99);
    check("its sentences are its own", strcmp(second_last_error(), "lk_logsumexp_backward_bf16: args is NULL") == 0 &&
                                           strcmp(lk_last_error(), "lk_logsumexp_backward_f32: x is NULL") == 0);
    check("the first version's kernels run", first_runs());
    check("the second version's kernels run", second_runs());
    check("and the first's again", first_runs());
    check("status names", strcmp(lk_status_string(LK_ERR_SHAPE), "LK_ERR_SHAPE") == 0 && lk_status_string(-999) != NULL);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
