# Links a shared library so that it loads on old Linux systems.
#
#   include(cmake/manylinux.cmake)        # after project(... LANGUAGES CXX CUDA)
#   add_library(my_binary SHARED ...)     # CXX and CUDA sources, or objects of OBJECT libraries
#   flashvar_link_manylinux(my_binary my_)
#
# The target then holds libstdc++ and the CUDA runtime, exports my_* alone, and needs no glibc
# newer than 2.28: it is linked against stubs of that version (glibc_stubs.py), written to
# ${CMAKE_BINARY_DIR}/glibc-2.28 during configuration. `auditwheel show` must say manylinux_2_28 or
# older. A symbol that glibc 2.28 lacks is an undefined reference when linking.
# Where this cannot work (another system, CPU or C library, no static libstdc++) a warning says why
# and the link is a plain one: good for this machine, not for a release.
#
# Objects of OBJECT libraries need the same visibility: flashvar_hide_symbols(<target>) on each.

include_guard(GLOBAL)

# Sets `result` to the CPU's name in the file of symbols, or to "" with the reason in `why_not`.
function(flashvar_manylinux_cpu result why_not)
  set(cpu "${CMAKE_SYSTEM_PROCESSOR}")
  if(cpu STREQUAL "AMD64")
    set(cpu "x86_64")
  elseif(cpu STREQUAL "arm64")
    set(cpu "aarch64")
  endif()
  set(reason "")
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(reason "manylinux is for Linux, found ${CMAKE_SYSTEM_NAME}")
  elseif(NOT EXISTS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/glibc-2.28-${cpu}.syms")
    set(reason "no list of the symbols of glibc 2.28 for ${cpu}, only for x86_64 and aarch64")
  elseif(NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
    set(reason "expected GNU or Clang as the C++ compiler, found ${CMAKE_CXX_COMPILER_ID}")
  else()
    foreach(archive IN ITEMS libc_nonshared.a libstdc++.a)
      execute_process(
        COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${archive}
        OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(NOT IS_ABSOLUTE "${path}")  # the compiler answers with the bare name of what it lacks
        set(reason "${CMAKE_CXX_COMPILER} has no ${archive}: install the C library's development "
                   "package and the static libstdc++ (libstdc++-static on Fedora and its kin)")
        string(CONCAT reason ${reason})
      endif()
    endforeach()
  endif()
  if(reason)
    set(cpu "")
  endif()
  set(${result} "${cpu}" PARENT_SCOPE)
  set(${why_not} "${reason}" PARENT_SCOPE)
endfunction()

# The static CUDA runtime: of FLASHVAR_CUDART_DIR, where another processor's is, else of the toolkit
# that nvcc belongs to: its own tree, in any of its layouts.
function(flashvar_find_cudart_static result)
  get_filename_component(compiler "${CMAKE_CUDA_COMPILER}" REALPATH)
  cmake_path(GET compiler PARENT_PATH bin)
  cmake_path(GET bin PARENT_PATH root)
  file(GLOB targets "${root}/targets/*/lib")
  find_library(library NAMES libcudart_static.a NO_CACHE NO_DEFAULT_PATH
    PATHS ${FLASHVAR_CUDART_DIR} ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} "${root}/lib64" "${root}/lib" ${targets})
  if(NOT library)
    message(FATAL_ERROR
      "libcudart_static.a not found (expected in the tree of ${compiler}).\n"
      "Searched: ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${root}/lib64 ${root}/lib ${targets}\n"
      "Install the toolkit's cudart package; from PyPI: cuda-toolkit[nvcc,cudart,crt,nvvm,cccl].")
  endif()
  set(${result} "${library}" PARENT_SCOPE)
endfunction()

function(flashvar_hide_symbols target)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# flashvar_manylinux: the link options and libraries of a target, made once per build.
function(flashvar_add_manylinux_interface)
  set(here "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
  add_library(flashvar_manylinux INTERFACE)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_link_options(flashvar_manylinux INTERFACE
      LINKER:--no-undefined LINKER:--exclude-libs,ALL
      # Relocations are read-only once the library is loaded, the stack is never code.
      LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack
      $<$<NOT:$<CONFIG:Debug>>:-s>)
  endif()
  flashvar_find_cudart_static(cudart)
  flashvar_manylinux_cpu(cpu why_not)
  if(NOT cpu)
    message(WARNING "flashvar: plain link, the binaries may need this machine's glibc: ${why_not}.")
    find_package(Threads REQUIRED)
    target_link_libraries(flashvar_manylinux INTERFACE
      "${cudart}" Threads::Threads ${CMAKE_DL_LIBS} $<$<PLATFORM_ID:Linux>:rt>)
    return()
  endif()

  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  set(stubs "${CMAKE_BINARY_DIR}/glibc-2.28")
  set(symbols "${here}/glibc-2.28-${cpu}.syms")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${here}/glibc_stubs.py"
            --symbols "${symbols}" --compiler "${CMAKE_CXX_COMPILER}" --output "${stubs}"
    RESULT_VARIABLE status ERROR_VARIABLE message)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "flashvar: the glibc 2.28 stubs could not be made (exit code ${status}).\n"
                        "${message}")
  endif()
  set_property(DIRECTORY APPEND PROPERTY
    CMAKE_CONFIGURE_DEPENDS "${symbols}" "${here}/glibc_stubs.py")

  add_library(flashvar_glibc_compat STATIC "${here}/glibc_compat.cc")
  set_target_properties(flashvar_glibc_compat PROPERTIES POSITION_INDEPENDENT_CODE ON)

  file(GLOB loader RELATIVE "${stubs}" "${stubs}/ld-linux-*")
  # -L as an option: target_link_directories would also put the stubs into the rpath.
  target_link_options(flashvar_manylinux INTERFACE "-L${stubs}" -nodefaultlibs LINKER:--as-needed)
  # -l:name and not paths: CMake would turn the path of libc.so.6 into -lc, the machine's own.
  # libgcc_s is the shared one because the static unwinder asks for _dl_find_object of glibc 2.35.
  target_link_libraries(flashvar_manylinux INTERFACE
    "${cudart}" -l:libstdc++.a flashvar_glibc_compat -lgcc_s
    -l:libpthread.so.0 -l:libdl.so.2 -l:librt.so.1 -l:libm.so.6 -l:libc.so.6 -l:${loader}
    -l:libc_nonshared.a -lgcc)
endfunction()

# `prefix` is that of the exported functions' names.
function(flashvar_link_manylinux target prefix)
  if(NOT TARGET flashvar_manylinux)
    flashvar_add_manylinux_interface()
  endif()
  flashvar_hide_symbols(${target})
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(exports "${CMAKE_CURRENT_BINARY_DIR}/${target}.map")
    file(CONFIGURE OUTPUT "${exports}" CONTENT "{ global: @prefix@*; local: *; };\n" @ONLY)
    target_link_options(${target} PRIVATE "LINKER:--version-script=${exports}")
  endif()
  # The host compiler links, so that nvcc's own defaults (cudart, rt, pthread, dl) stay out.
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
  target_link_libraries(${target} PRIVATE flashvar_manylinux)
endfunction()
