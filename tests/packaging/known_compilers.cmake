# Lets the projects of a test run ask the same compilers once: CMake takes four seconds for that.
#
#   KNOWN_COMPILERS=<folder> CMAKE_TOOLCHAIN_FILE=<this file> cmake ...
#
# What CMake found out is kept in the folder, for each set of compilers and flags. The first project of
# a set asks, as any user's does.

include_guard(GLOBAL)
get_property(tries GLOBAL PROPERTY IN_TRY_COMPILE)
if(tries OR NOT DEFINED ENV{KNOWN_COMPILERS})
  return()
endif()

function(keep_what_is_known known)
  file(GLOB found "${CMAKE_PLATFORM_INFO_DIR}/CMake*Compiler.cmake")
  string(RANDOM number)
  file(COPY ${found} DESTINATION "${known}.${number}")
  file(RENAME "${known}.${number}" "${known}" RESULT ignored)  # another process may be the first
endfunction()

set(asked "${CMAKE_VERSION}" "${CMAKE_CUDA_COMPILER}" "${CMAKE_CUDA_FLAGS}" "${CMAKE_CXX_FLAGS}")
foreach(name IN ITEMS CXX CXXFLAGS CUDACXX CUDAFLAGS CUDAHOSTCXX LDFLAGS
                      NVCC_APPEND_FLAGS NVCC_CCBIN NVCC_PREPEND_FLAGS)
  list(APPEND asked "${name}=$ENV{${name}}")
endforeach()
string(SHA256 asked "${asked}")
set(known "$ENV{KNOWN_COMPILERS}/${asked}")
if(EXISTS "${known}")
  file(COPY "${known}/" DESTINATION "${CMAKE_PLATFORM_INFO_DIR}")
  set(CMAKE_EXECUTABLE_FORMAT ELF CACHE INTERNAL "")  # CMake saw it in what it compiled
else()
  cmake_language(EVAL CODE "cmake_language(DEFER CALL keep_what_is_known [[${known}]])")
endif()
