# SPDX-License-Identifier: MIT
# find_package(lk) gives lk::headers, and lk::lk where liblk.so is installed: what CMakeLists.txt gives to those who build lk.
file(REAL_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." lk_prefix)
if(NOT TARGET lk::headers)
  add_library(lk::headers INTERFACE IMPORTED)
  target_include_directories(lk::headers INTERFACE "${lk_prefix}/include")
  target_compile_features(lk::headers INTERFACE
    $<$<BOOL:$<CXX_COMPILER_ID>>:cxx_std_17> $<$<BOOL:$<CUDA_COMPILER_ID>>:cuda_std_17>)
  if(EXISTS "${lk_prefix}/lib/liblk.so")
    add_library(lk::lk SHARED IMPORTED)
    set_target_properties(lk::lk PROPERTIES IMPORTED_LOCATION "${lk_prefix}/lib/liblk.so")
    target_link_libraries(lk::lk INTERFACE lk::headers)
  elseif(NOT lk_FIND_QUIETLY)
    message(STATUS "lk: lk::headers alone. lk::lk needs ${lk_prefix}/lib/liblk.so, which `make install` puts there where nvcc is")
  endif()
endif()
