// SPDX-License-Identifier: MIT
// Stands for module.cpp in a wheel for all versions of Python: ../any_python.py calls the ops by torch.ops.
namespace lk_torch { extern const char ops_namespace[] = "lk"; }

// While glibc's is true, g++'s headers count references without atomics. glibc has it from 2.32 on, so the library has its own.
extern "C" __attribute__((visibility("hidden"))) const char __libc_single_threaded = 0;
