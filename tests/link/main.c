// SPDX-License-Identifier: MIT
/* A program of a C file, a C++ file and two .cu files, all of which include lk, and a library with its functions. One .cu file
 * only declares them; the other includes another version of lk, whose structs are different, with LK_API static. It links, both
 * versions run, and each keeps its own last error. Then it loads two plugins, which keep this version and the other one to
 * themselves, as libraries do that vendor lk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lk/logsumexp.cuh"

LK_DECLARE_LOGSUMEXP(f32)

int first_runs(void);
int first_version(void);
int second_errors(void);
int second_runs(void);
int second_version(void);
const char *second_last_error(void);
int host_errors(void);
int declares_errors(void);
typedef int version_function(void);
version_function *declares_version(void);
version_function *first_version_function(void);

static int failed, passed;
static void check(const char *name, int good)
{
    printf("%s  %s\n", good ? "ok  " : "FAIL", name);
    *(good ? &passed : &failed) += 1;
}

/* A plugin and four functions of it. They are exported, as all is by default, and the program's library has functions of the same
 * names, and so has the other plugin. */
typedef struct {
    void *library;
    int (*runs)(void), (*version)(void), (*errors)(void);
    const char *(*last_error)(void);
} plugin;
static void *library(const char *name, int flags) /* in the folder of the program */
{
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length < 0 ? 0 : length] = '\0';
    char *const slash = strrchr(path, '/');
    snprintf(slash, sizeof path - (size_t)(slash - path), "/%s", name);
    return dlopen(path, flags);
}
static plugin load(const char *name)
{
    plugin p = {.library = library(name, RTLD_NOW | RTLD_GLOBAL)};
    if (!p.library) return printf("%s\n", dlerror()), p;
    *(void **)&p.runs = dlsym(p.library, "first_runs"), *(void **)&p.version = dlsym(p.library, "first_version");
    *(void **)&p.errors = dlsym(p.library, "first_errors"), *(void **)&p.last_error = dlsym(p.library, "first_last_error");
    return p;
}

static void plugins(void)
{
    const plugin ours = load("plugin.so"), other = load("plugin_other.so");
    check("two plugins with different versions are loaded", ours.runs && ours.version && other.runs && other.version);
    if (!ours.runs || !other.runs) return;
    check("each has its own version", ours.version() == LK_VERSION && other.version() == LK_VERSION - LK_VERSION % 100 + 99);
    check("the kernels of this version run", ours.runs());
    check("those of the other run", other.runs());
    const int said = ours.errors() && other.last_error()[0] == '\0';
    check("each has its own sentences", said && other.errors() && ours.last_error() != other.last_error() &&
                                           strcmp(other.last_error(), "lk_logsumexp_forward_f32: args is NULL") == 0);
    check("none is the program's", strcmp(lk_last_error(), "lk_logsumexp_backward_f32: x is NULL") == 0);
    check("none of their functions of lk is exported",
          !dlsym(ours.library, "lk_last_error") && !dlsym(other.library, "lk_logsumexp_forward_f32"));
    dlclose(ours.library), dlclose(other.library);
    check("both are unloaded", !library("plugin.so", RTLD_NOW | RTLD_NOLOAD) && !library("plugin_other.so", RTLD_NOW | RTLD_NOLOAD));
}

int main(void)
{
    lk_logsumexp_args args = {.outer = 3, .cols = 5};
    check("no error before the first", lk_last_error()[0] == '\0');
    check("C calls the library", lk_logsumexp_forward_f32(&args, NULL) == LK_ERR_NULL);
    check("C reads its sentence", strcmp(lk_last_error(), "lk_logsumexp_forward_f32: x is NULL") == 0);
    check("C++ without CUDA too", host_errors());
    check("and a .cu file that declares", declares_errors());
    check("whose lk_version is the library's", declares_version() == first_version_function());
    check("another version's static copy in a second .cu file", second_errors() == 8);
    check("it is another version", first_version() == LK_VERSION && lk_version() == LK_VERSION && second_version() == LK_VERSION + 99);
    check("its sentences are its own", strcmp(second_last_error(), "lk_logsumexp_backward_workspace_bytes_bf16: args is NULL") == 0 &&
                                           strcmp(lk_last_error(), "lk_logsumexp_backward_f32: x is NULL") == 0);
    check("the first version's kernels run", first_runs());
    check("the second version's kernels run", second_runs());
    check("and the first's again", first_runs());
    plugins();
    check("status names", strcmp(lk_status_string(LK_ERR_SHAPE), "LK_ERR_SHAPE") == 0 && lk_status_string(-999) != NULL);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
