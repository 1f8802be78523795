# Builds what one plan of flashvar_factory asks for: a shared library, and the manifest beside it.
#
#   include(${FLASHVAR_PLAN})                      # after project(... LANGUAGES CXX CUDA)
#   flashvar_add_binary(SOURCES abi/one.cc ...)    # in the folder of the sources
#
# The plan (plan.cmake, generated) sets FLASHVAR_* variables and includes this file; nothing here
# knows which kernels are built. The SOURCES are the project's own, the plan adds a .cu per kernel.
# Includes are found from the calling folder and from the generated one.

include_guard(GLOBAL)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
include(${CMAKE_CURRENT_LIST_DIR}/manylinux.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/reproducible.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/sbom.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/torch.cmake)

function(flashvar_add_binary)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "SOURCES")
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH home)
  set(python_path ${home}/src/python)
  set(manifest ${CMAKE_CURRENT_BINARY_DIR}/manifest.json)
  set(launcher ${Python_EXECUTABLE} -S -E ${python_path}/flashvar_factory/build/ptxas_report.py)
  list(APPEND launcher ${FLASHVAR_CUDA_LAUNCHER})  # a compiler cache, or nothing

  add_library(${FLASHVAR_LIBRARY} SHARED ${arg_SOURCES} ${FLASHVAR_INSTANCES})
  target_include_directories(${FLASHVAR_LIBRARY} PRIVATE
    ${CMAKE_CURRENT_SOURCE_DIR}
    ${FLASHVAR_GENERATED_DIR}
    ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  set_target_properties(${FLASHVAR_LIBRARY} PROPERTIES
    CXX_STANDARD 17
    CXX_STANDARD_REQUIRED ON
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON
    CUDA_ARCHITECTURES "${FLASHVAR_CUDA_ARCHITECTURES}"
    # Keeps what ptxas says of each object beside it, for the manifest, and prints what matters.
    CUDA_COMPILER_LAUNCHER "${launcher}")
  target_compile_options(${FLASHVAR_LIBRARY} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v --compress-mode=${FLASHVAR_COMPRESSION}>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FLASHVAR_LINEINFO}>>:-lineinfo>)
  flashvar_reproducible(${FLASHVAR_LIBRARY})
  flashvar_link_manylinux(${FLASHVAR_LIBRARY} ${FLASHVAR_PROJECT}_)
  if(FLASHVAR_TORCH_DIR)
    flashvar_call_torch(${FLASHVAR_LIBRARY})
  endif()

  add_custom_command(
    OUTPUT ${manifest}
    COMMAND ${CMAKE_COMMAND} -E env PYTHONPATH=${python_path}
            ${Python_EXECUTABLE} -m flashvar_factory manifest
            --plan-json ${FLASHVAR_PLAN_JSON}
            --library $<TARGET_FILE:${FLASHVAR_LIBRARY}>
            --objects-dir ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${FLASHVAR_LIBRARY}.dir
            --output ${manifest}
    DEPENDS ${FLASHVAR_LIBRARY} ${FLASHVAR_PLAN_JSON}
    COMMENT "Writing manifest.json"
    VERBATIM)
  add_custom_target(manifest ALL DEPENDS ${manifest})

  # The manifest goes last: a directory that holds one holds the library it describes.
  install(TARGETS ${FLASHVAR_LIBRARY} LIBRARY DESTINATION ${FLASHVAR_PACKAGE_DIR})
  install(FILES ${manifest} DESTINATION ${FLASHVAR_PACKAGE_DIR})
  flashvar_install_sbom(${manifest})
endfunction()
