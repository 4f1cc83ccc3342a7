# SPDX-License-Identifier: MIT
# The version of the headers beside this file. Before 1.0 a new minor version may change the structs, so 0.3.1 serves those who
# ask for 0.3 and 0.4.0 does not.
file(REAL_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." lk_prefix)
file(STRINGS "${lk_prefix}/include/lk/lk_base.cuh" lk_version REGEX "^#define LK_VERSION_(MAJOR|MINOR|PATCH) ")
list(TRANSFORM lk_version REPLACE "[^0-9]+" "")
list(JOIN lk_version "." PACKAGE_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" lk_minor "${PACKAGE_VERSION}")
if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION AND "${PACKAGE_FIND_VERSION}." MATCHES "^${lk_minor}\\.")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
